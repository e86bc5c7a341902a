r"""Changes the governor's mode on a running server: off, shadow or on.

    python -m engine_hooks.mode http://127.0.0.1:30000 shadow

It sends what ``curl`` can send as well, with 0 for off, 1 for shadow, 2 for on::

    curl -X POST http://127.0.0.1:30000/set_internal_state \
        -H 'Content-Type: application/json' -d '{"server_args": {"specgovernor_mode": 1}}'

SGLang hands it to all tensor-parallel ranks between two rounds, the same two on each.
"""

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

from engine_hooks.settings import MODES
from engine_hooks.symbols import MODE_KEY

LIMIT_S = 30.0
MAX_ANSWER_BYTES = 65_536


def change_mode(url: str, mode: str, api_key: str | None = None) -> bool:
    """Ask a server to change the mode; return whether it did.

    Raises:
        OSError: If it cannot be reached or refuses the request.
        http.client.HTTPException: If it does not speak HTTP, or the URL is none.
        ValueError: If the answer is none of SGLang's.
        RecursionError: Likewise.
    """
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    body = json.dumps({"server_args": {MODE_KEY: MODES.index(mode)}}).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}/set_internal_state", body, headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
        answers = json.loads(
            response.read(MAX_ANSWER_BYTES)
        )  # One true or false for each data-parallel replica.
    if not isinstance(answers, list):
        raise ValueError(f"expected a list of true and false, got {answers!r:.80}")
    return bool(answers) and all(answer is True for answer in answers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Change the mode; return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine_hooks.mode")
    parser.add_argument("url", help="of the SGLang server")
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--api-key", help="if the server was started with one")
    options = parser.parse_args(arguments)
    try:
        changed = change_mode(options.url, options.mode, options.api_key)
    except (OSError, ValueError, http.client.HTTPException, RecursionError) as error:
        why = str(error) or type(error).__name__
        print(f"error: {options.url} did not change the mode: {why:.200}", file=sys.stderr)
        return 2
    if not changed:
        print(
            f"error: {options.url} refused the mode {options.mode}; its log says why",
            file=sys.stderr,
        )
        return 1
    print(f"the governor is {options.mode}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
