"""Pictures of throughput and inter-token latency against concurrency, vLLM's policy beside ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from vllm_handoff.simulator.calibration import Calibration, even_pipeline
from vllm_handoff.simulator.requests import Arrivals, burst, closed_loop

STAGES = (2, 4, 8, 16)
CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
ENGINES = (("mp", "vLLM's policy", "#c0504d", "o"), ("handoff", "even rounds", "#1f77b4", "s"))
# A load's name, and what it is.
LOADS = {
    "steady": "clients that ask again as soon as they are answered, 512 + 64..192 tokens",
    "burst": "all at once, 32 + 128 tokens",
}


class Sample(NamedTuple):
    """What clients saw.

    Attributes:
        throughput: generated tokens a second.
        middle, late: inter-token latency, p50 and p99, in seconds.
    """

    throughput: float
    middle: float
    late: float


def sample(load: str, engine: str, stages: int, clients: int, calibration: Calibration) -> Sample:
    """One load at one concurrency.

    "steady": three requests a client, at least eight in all, of which the
    middle third of the tokens counts, so that neither the filling nor the
    draining of the engine does. "burst": one request a client, all of which counts.
    """
    pipeline = even_pipeline(engine, stages, calibration, requests=max(512, clients))
    if load == "burst":
        run = pipeline.run(Arrivals(burst(clients, 32, 128, calibration.constants.host.admit)))
    else:
        run = pipeline.run(closed_loop(clients, max(8, 3 * clients), 512, (64, 192)))
    times = sorted(at for request in run.requests for at in request.times)
    first, last = (0, len(times) - 1) if load == "burst" else (len(times) // 3, 2 * len(times) // 3)
    begin, end = times[first], times[last]
    gaps = sorted(
        b - a for request in run.requests for a, b in zip(request.times, request.times[1:]) if begin <= b <= end
    )
    throughput = (last - first) / max(end - begin, 1e-9)
    return Sample(throughput, gaps[len(gaps) // 2], gaps[int(0.99 * len(gaps))])


Samples = dict[tuple[str, str, int, int], Sample]


def draw(folder: Path, calibration: Calibration, say: Callable[[str], None] = print) -> list[Path]:
    """Write throughput.png and inter_token_latency.png: a column for each number of stages, a row for each load.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    from tqdm import tqdm

    work = [
        (load, engine, stages, clients)
        for load in LOADS
        for engine, *_ in ENGINES
        for stages in STAGES
        for clients in CLIENTS
    ]
    samples = {
        (load, engine, stages, clients): sample(load, engine, stages, clients, calibration)
        for load, engine, stages, clients in tqdm(work, unit="run", mininterval=2)
    }
    folder.mkdir(parents=True, exist_ok=True)
    layers = len(calibration.model.layers) // 2
    files = []
    for name, title, fields, scale in (
        ("throughput", "generated tokens/s", ("throughput",), 1.0),
        ("inter_token_latency", "inter-token latency, ms", ("middle", "late"), 1000.0),
    ):
        path = folder / f"{name}.png"
        title = f"{title}, simulated: {layers} layers of an 8B Llama a stage, on H200s"
        _figure(path, title, samples, fields, scale)
        say(f"wrote {path}")
        files.append(path)
    return files


def _figure(path: Path, title: str, samples: Samples, fields: tuple[str, ...], scale: float) -> None:
    from matplotlib import pyplot as plt

    rows = len(LOADS) + 1
    figure, axes = plt.subplots(rows, len(STAGES), figsize=(15, 3.3 * rows), sharex=True, sharey="row")
    for row, (load, what) in enumerate(LOADS.items()):
        for column, stages in enumerate(STAGES):
            axis = axes[row][column]
            _curves(axis, load, stages, samples, fields, scale)
            axis.set_yscale("log")
            if row == 0:
                axis.set_title(f"PP={stages}")
        axes[row][0].set_ylabel(what.replace(", ", ",\n").replace("as soon", "\nas soon"), fontsize=9)
    for column, stages in enumerate(STAGES):
        axis = axes[-1][column]
        for load, style in zip(LOADS, ("-", "--"), strict=True):
            for field, colour in zip(fields, ("#333333", "#999999")):
                ratios = [
                    getattr(samples[load, "handoff", stages, n], field) / getattr(samples[load, "mp", stages, n], field)
                    for n in CLIENTS
                ]
                axis.plot(CLIENTS, ratios, style, color=colour, label=load + _suffix(field))
        axis.axhline(1.0, color="#c0504d", linewidth=0.8)
        axis.set_xlabel("clients")
    axes[-1][0].set_ylabel("even rounds over vLLM's policy", fontsize=9)
    for axis in axes.flat:
        axis.set_xscale("log", base=2)
        axis.set_xticks(CLIENTS[::2], [str(clients) for clients in CLIENTS[::2]])
        axis.grid(alpha=0.3, which="both", linewidth=0.5)
    axes[0][0].legend(frameon=False, fontsize=8)
    axes[-1][0].legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _curves(axis: Any, load: str, stages: int, samples: Samples, fields: tuple[str, ...], scale: float) -> None:
    for engine, label, colour, marker in ENGINES:
        for field, style in zip(fields, ("-", ":")):
            values = [scale * getattr(samples[load, engine, stages, clients], field) for clients in CLIENTS]
            axis.plot(
                CLIENTS, values, style, color=colour, marker=marker, markersize=4, label=label + _suffix(field)
            )  # fmt: skip


def _suffix(field: str) -> str:
    return {"middle": ", p50", "late": ", p99"}.get(field, "")
