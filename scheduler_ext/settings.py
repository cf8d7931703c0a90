"""What users may set, in one place: `--additional-config '{"handoff": {...}}'`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

# More rounds in flight only make buffers and waste after stop tokens larger.
MOST_ROUNDS_PER_STAGE = 4
# Rounds in flight beyond one for each stage, unless the user says otherwise.
ROUNDS_AHEAD = 2


class SettingsError(ValueError):
    """A setting of vllm-handoff that cannot be used, with what can."""


@dataclass(frozen=True)
class HandoffSettings:
    """Settings of one engine.

    Attributes:
        depth: rounds in flight before the engine waits for an output; None for
            the default, two more than there are stages. Asynchronous scheduling alone uses it.
        split_rows: decoding requests from which they are spread evenly over as many rounds as there are
            stages; "auto" decides by measured times of stages and hosts over how many, 0 never spreads.
        layer_split: "auto" gives the stages as many layers as `vllm-handoff plan`
            advises, unless VLLM_PP_LAYER_PARTITION is set; "even" leaves it to vLLM.
        prefill_chunks: "auto" gives a round no more prompt tokens than pays while few wait,
            "budget" as many as fit its token budget, as vLLM does.
        rendezvous: on GPUs, a transfer between stages starts once both ends have come
            to it, so that no kernel waits for a peer; false: NCCL's kernels wait.
        stall_seconds: rounds in flight without progress of any stage for so long
            end the engine; 0 never does.
        share_gpu: all ranks use the first GPU, for trying and testing where there is only one.
    """

    depth: int | None = None
    split_rows: int | Literal["auto"] = "auto"
    layer_split: Literal["even", "auto"] = "even"
    prefill_chunks: Literal["auto", "budget"] = "auto"
    rendezvous: bool = True
    # Well above what a round takes that makes no progress a stage could show, such as one kernel that runs for
    # long, and below vLLM's limit of 300 s a round.
    stall_seconds: float = 120
    share_gpu: bool = False

    @classmethod
    def of(cls, vllm_config: Any) -> HandoffSettings:
        """The settings in a VllmConfig.

        Raises:
            SettingsError: an unknown name, or a value out of range.
        """
        extra = vllm_config.additional_config
        given = extra.get("handoff", {}) if isinstance(extra, dict) else {}
        if not isinstance(given, dict):
            raise SettingsError(f'additional_config["handoff"] is {given!r}; it must be an object of settings')
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise SettingsError(
                    f'additional_config["handoff"] has no setting {name!r}; there are {", ".join(known)}'
                )
        settings = cls(**given)
        settings._check(vllm_config.parallel_config.pipeline_parallel_size)
        return settings

    def rounds_in_flight(self, stages: int) -> int:
        """The depth, with its default worked out."""
        # As many rounds as there are stages are being computed. Two more cover the time in
        # which an output is collected and the round after it planned, sent and launched
        # (measured at two stages: one is too few); any further one would only stand
        # before a prompt that arrives.
        return stages + ROUNDS_AHEAD if self.depth is None else self.depth

    def _check(self, stages: int) -> None:
        most = MOST_ROUNDS_PER_STAGE * stages
        if self.depth is not None and not (isinstance(self.depth, int) and stages <= self.depth <= most):
            raise SettingsError(
                f"handoff depth {self.depth!r} is out of range: "
                f"{stages} stages take {stages} to {most} rounds in flight"
            )
        if self.split_rows != "auto" and not (isinstance(self.split_rows, int) and self.split_rows >= 0):
            raise SettingsError(f'handoff split_rows {self.split_rows!r} must be "auto" or a number of requests from 0')
        if self.layer_split not in ("even", "auto"):
            raise SettingsError(f'handoff layer_split {self.layer_split!r} must be "even" or "auto"')
        if self.prefill_chunks not in ("auto", "budget"):
            raise SettingsError(f'handoff prefill_chunks {self.prefill_chunks!r} must be "auto" or "budget"')
        for name in ("rendezvous", "share_gpu"):
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(f"handoff {name} {getattr(self, name)!r} must be true or false")
        stall = self.stall_seconds
        if isinstance(stall, bool) or not isinstance(stall, int | float) or not (stall == 0 or stall >= 1):
            raise SettingsError(f"handoff stall_seconds {stall!r} must be 0 (never) or a number of seconds from 1")
