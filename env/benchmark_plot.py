"""How the time of a decision grows: the figure of ``python -m env.benchmark --plot``."""

from pathlib import Path

import numba

from controller.calibration import Calibration
from controller.errors import ConfigError
from env import benchmark


def draw(calibration: Calibration, path: Path) -> None:
    """Measure over running requests and over servers, and draw both into an image file.

    CPU time on one thread is drawn, so that other work on the machine does not bend the curves.

    Raises:
        ConfigError: If matplotlib is missing, or the file's ending is no image format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; pip install 'specgovernor[plot]'"
        ) from error
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ConfigError(f"{path}: expected a name that ends in one of {', '.join(formats)}")
    numba.set_num_threads(1)

    def decision_us(servers: int, running: int) -> float:
        driver = benchmark.Driver(calibration, servers, running)
        speed = benchmark.measure(driver, driver.compiled, windows=3)
        return 1e6 / speed.decisions_per_cpu_s

    left, right = figure.subplots(1, 2)
    requests, servers = benchmark.PLOT_RUNNING, benchmark.PLOT_SERVERS
    left.plot(requests, [decision_us(benchmark.SERVERS, n) for n in requests], "o-")
    left.set(
        xlabel="running requests a server",
        ylabel="CPU time of a decision, µs",
        title=f"{benchmark.SERVERS} servers",
        ylim=(0.0, None),
    )
    right.plot(servers, [n * decision_us(n, benchmark.RUNNING) for n in servers], "o-")
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    right.set(
        xlabel="servers",
        ylabel="CPU time of a decision on each, µs",
        title=f"{benchmark.RUNNING} running requests a server",
    )
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_formatter("{x:g}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)
