"""What our workers add to vLLM's: they obey manifests. Imports no model runner, so it is cheap to look at."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from vllm_handoff.scheduler_ext.manifest import Manifest, manifest_of
from vllm_handoff.worker import work_clock
from vllm_handoff.worker.device_clock import DeviceClock
from vllm_handoff.worker.device_progress import DeviceProgress
from vllm_handoff.worker.recorder import Mark, Recorder
from vllm_handoff.worker.timeline import Timeline
from vllm_handoff.worker.warm_up import WarmUpManifests

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base

    from vllm_handoff.scheduler_ext.policy import StagePoint
    from vllm_handoff.worker.stage_links import StageLinks
else:
    _Base = object


class MissingManifestError(RuntimeError):
    """A round reached a pipeline stage without a manifest."""


class HandoffWorkerMixin(_Base):
    """Sets each round's manifest before vLLM's worker runs it, and replaces the transfers between stages."""

    _links: StageLinks | None = None
    _warm_up: WarmUpManifests | None = None
    _timeline: Timeline
    _recorder: Recorder
    _progress: DeviceProgress
    # The round under way, if it is the scheduler's.
    _round: int | None = None
    _decodes = False  # whether it has nothing else

    def init_device(self) -> None:
        self._timeline = Timeline()
        super().init_device()
        self._recorder = Recorder(self.device)
        self._progress = DeviceProgress(self.device)
        self.model_runner.recorder = self._recorder

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        stages = self.parallel_config.pipeline_parallel_size
        if stages == 1:
            return
        from vllm_handoff.worker.stage_links import StageLinks

        self._links = StageLinks(self.vllm_config, self.model_runner, self.device, self._recorder)
        self._warm_up = WarmUpManifests(stages, width=1 + self.vllm_config.num_speculative_tokens)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        if self._links is not None:
            self._links.drain()
        # From here on every round is the scheduler's.
        self._warm_up = None
        self.model_runner.end_warm_up()
        # What start-up made lives as long as this process; looking at it again and again would hold up rounds.
        gc.freeze()
        if self.device.type == "cuda":
            # Not before: graphs are captured in warm-up, and a capture takes no timing events.
            self._recorder.clock = self._progress.clock = DeviceClock(self.device)
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        manifest = self._manifest(scheduler_output)
        if manifest is None:
            return super().execute_model(scheduler_output)
        self._timeline.begin(manifest.round)
        self._recorder.begin(manifest.round, manifest.num_tokens, len(manifest.rows), scheduler_output)
        self._round = manifest.round if self._warm_up is None else None
        self._decodes = manifest.only_decodes
        self.model_runner.begin_round(manifest)
        if self._links is not None:
            self._links.begin_round(manifest)
        output = super().execute_model(scheduler_output)
        self._recorder.mark(Mark.FORWARD)
        if not manifest.num_tokens:
            self._end_round()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        self._end_round(waited=grammar_output is not None)
        return output

    def _end_round(self, waited: bool = False) -> None:
        self._timeline.end()
        marks = self._recorder.end()
        if self._round is None:
            return
        if self._decodes and not waited and self.device.type == "cuda":
            work_clock.here().only_decodes()
        self._progress.launched(self._round, marks)
        self._round = None

    def handoff_stage_times(self) -> list[StagePoint]:
        """What this rank's stage takes for decoding rounds. Called once, after warm-up."""
        from vllm_handoff.worker.stage_clock import measure_stage

        return measure_stage(self.model_runner, self.device)

    def handoff_record(self, on: bool) -> list[tuple[Any, ...]]:
        """Start recording what the device does in each round, or stop and return it (see recorder.RecordedRound)."""
        if on:
            self._recorder.start()
            return []
        return [tuple(entry) for entry in self._recorder.stop()]

    def handoff_timeline(self) -> list[tuple[int, int, int]]:
        """(round, begin_ns, end_ns) of the last rounds on this rank, by the machine's monotonic clock."""
        return self._timeline.rounds()

    def _manifest(self, scheduler_output: Any) -> Manifest | None:
        manifest = manifest_of(scheduler_output)
        if manifest is None and self._warm_up is not None:
            return self._warm_up.manifest(scheduler_output)
        if manifest is None and self._links is not None:
            raise MissingManifestError(
                "a round without a manifest reached a pipeline stage: its scheduler is not one of "
                "vllm_handoff.scheduler_ext.scheduler. Leave --scheduler-cls out."
            )
        return manifest
