"""Where metrics go: Weights & Biases, by default into local files."""

from typing import Any, Protocol


class Run(Protocol):
    """What training needs of a W&B run."""

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        """Record metrics."""

    def finish(self) -> None:
        """Flush and close."""


class NoRun:
    """Keeps nothing."""

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        """Drop the metrics."""

    def finish(self) -> None:
        """Do nothing."""


def open_run(mode: str, config: dict[str, Any]) -> Run:
    """Start a run.

    Args:
        mode: ``"offline"`` (files under ``wandb/``), ``"online"`` or ``"disabled"``.
        config: Settings to record.
    """
    if mode == "disabled":
        return NoRun()
    import wandb  # slow to import, and of no use when disabled

    run: Run = wandb.init(
        project="specgovernor",
        mode=mode,  # type: ignore[arg-type]
        config=config,
        settings=wandb.Settings(silent=True, console="off"),
    )
    return run
