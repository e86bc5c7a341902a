"""The process that holds one SGLang engine; `harness.py` starts it and talks to it.

Commands come in on standard input and replies go out on the file descriptor that is named on the
command line, each a JSON object a line. Standard output and error are the engine's own.

A command is {"id", "op", ...}; every reply to it carries its id. Commands run side by side.

| op | more of the command | replies |
| --- | --- | --- |
| generate | requests: [{input_ids, sampling_params}], SGLang's options of all | result: outputs |
| submit | request: {rid, input_ids, sampling_params} | num_tokens, growing; result: an output |
| abort | rid | result: null |
| server_info | | result: the resolved arguments and each scheduler's internal state |
| set_state | values: {name: number} | result: whether SGLang took them |
| flush_cache | | result: whether the cache is empty |

An output is SGLang's: {"output_ids", "meta_info", ...}. A failed command's reply has an error.
"""

import asyncio
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

Reply = Callable[..., None]


async def execute(engine: Any, command: dict[str, Any], reply: Reply) -> object:
    """Carry out one command; return its result."""
    manager = engine.tokenizer_manager
    match command["op"]:
        case "generate":
            requests = command["requests"]
            return await engine.async_generate(
                input_ids=[request["input_ids"] for request in requests],
                sampling_params=[request["sampling_params"] for request in requests],
                **command.get("options", {}),
            )
        case "submit":
            output = None
            async for output in await engine.async_generate(stream=True, **command["request"]):
                reply(num_tokens=output["meta_info"]["completion_tokens"])
            return output
        case "abort":
            return manager.abort_request(rid=command["rid"])
        case "server_info":
            states = await manager.get_internal_state()
            return {**manager.server_args.resolved_dict(), "internal_states": states}
        case "set_state":
            from sglang.srt.managers.io_struct import SetInternalStateReq

            return await manager.set_internal_state(
                SetInternalStateReq(server_args=command["values"])
            )
        case "flush_cache":
            return (await manager.flush_cache()).success
        case unknown:
            raise ValueError(f"unknown op {unknown!r}; see the table in {__file__}")


async def serve(engine: Any, send: Reply) -> None:
    """Carry out commands until standard input ends."""
    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(commands.put_nowait, None)

    async def run(command: dict[str, Any]) -> None:
        def reply(**fields: object) -> None:
            send(id=command["id"], **fields)

        try:
            reply(result=await execute(engine, command, reply))
        except Exception:
            reply(error=traceback.format_exc())

    threading.Thread(target=read, daemon=True).start()
    tasks = set()
    while (command := await commands.get()) is not None:
        task = asyncio.create_task(run(command))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def main() -> None:
    """Start the engine with the arguments given as JSON, say so, and serve."""
    replies = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")

    def send(**fields: object) -> None:
        replies.write(json.dumps(fields, default=str) + "\n")
        replies.flush()

    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[2]))
    send(id=0, result="ready")
    engine.loop.run_until_complete(serve(engine, send))
    engine.shutdown()


if __name__ == "__main__":
    main()
