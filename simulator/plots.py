"""Pictures of throughput and inter-token latency against concurrency, vLLM's policy beside ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from vllm_handoff.simulator.calibration import Calibration, even_pipeline
from vllm_handoff.simulator.requests import closed_loop

STAGES = (2, 4, 8, 16)
CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
ENGINES = (("mp", "vLLM's policy", "#c0504d", "o"), ("handoff", "even rounds", "#1f77b4", "s"))
PROMPT, GENERATED = 512, (64, 192)


class Sample(NamedTuple):
    """What clients saw.

    Attributes:
        throughput: generated tokens a second.
        middle, late: inter-token latency, p50 and p99, in seconds.
    """

    throughput: float
    middle: float
    late: float


def sample(engine: str, stages: int, clients: int, calibration: Calibration) -> Sample:
    """`clients` clients, each with a new request as soon as the last one is answered: three requests each, at least 8.

    Only the middle third of the tokens counts, so that neither the filling nor
    the draining of the engine does.
    """
    arrivals = closed_loop(clients, max(8, 3 * clients), PROMPT, GENERATED)
    run = even_pipeline(engine, stages, calibration, requests=max(512, clients)).run(arrivals)
    times = sorted(at for request in run.requests for at in request.times)
    begin, end = times[len(times) // 3], times[2 * len(times) // 3]
    gaps = sorted(
        b - a for request in run.requests for a, b in zip(request.times, request.times[1:]) if begin <= b <= end
    )
    throughput = (len(times) // 3) / max(end - begin, 1e-9)
    return Sample(throughput, gaps[len(gaps) // 2], gaps[int(0.99 * len(gaps))])


def draw(folder: Path, calibration: Calibration, say: Callable[[str], None] = print) -> list[Path]:
    """Write throughput.png and inter_token_latency.png, one panel for each number of stages.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from tqdm import tqdm

    work = [(stages, engine, clients) for stages in STAGES for engine, *_ in ENGINES for clients in CLIENTS]
    samples = {key: sample(key[1], key[0], key[2], calibration) for key in tqdm(work, unit="run", mininterval=2)}
    folder.mkdir(parents=True, exist_ok=True)
    layers = len(calibration.model.layers) // 2
    note = (
        f"simulated: {layers} layers of an 8B Llama a stage, H200; {PROMPT} + {GENERATED[0]}..{GENERATED[1]} tokens, "
        "each client asks again as soon as it is answered"
    )
    files = []
    for name, what, curves in (
        ("throughput", "generated tokens/s", (("throughput", "-", 1.0),)),
        ("inter_token_latency", "inter-token latency, ms", (("middle", "-", 1000.0), ("late", ":", 1000.0))),
    ):
        figure, axes = plt.subplots(1, len(STAGES), figsize=(16, 4.6), sharey=True, layout="constrained")
        for axis, stages in zip(axes, STAGES, strict=True):
            _panel(axis, stages, samples, curves)
        axes[0].set_ylabel(what)
        axes[0].legend(frameon=False)
        figure.suptitle(f"{what} against concurrency\n", fontsize=13)
        figure.text(0.5, 0.925, note, ha="center", fontsize=9, color="#555555")
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        say(f"wrote {path}")
        files.append(path)
    return files


def _panel(axis: Any, stages: int, samples: dict[tuple[int, str, int], Sample], curves: Any) -> None:
    for engine, label, colour, marker in ENGINES:
        for field, style, scale in curves:
            values = [scale * getattr(samples[stages, engine, clients], field) for clients in CLIENTS]
            kind = {"middle": " (p50)", "late": " (p99)"}.get(field, "")
            axis.plot(CLIENTS, values, style, color=colour, marker=marker, markersize=4, label=label + kind)
    axis.set_title(f"PP={stages}")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(CLIENTS[::2], [str(clients) for clients in CLIENTS[::2]])
    axis.set_xlabel("clients")
    axis.grid(alpha=0.3, which="both", linewidth=0.5)
