"""Where the load goes: an engine in this process, or a running server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol

EXECUTOR = "vllm_handoff.executor.HandoffExecutor"
TOY_EXECUTOR = "vllm_handoff.stress.toy_executor.ToyExecutor"
EXTENSION = "vllm_handoff.stress.worker_extension.StressExtension"


class Chunk(NamedTuple):
    """Some tokens of an answer, and why it ends if these are the last."""

    token_ids: list[int]
    finish_reason: str | None


class Client(Protocol):
    """Takes requests.

    Attributes:
        preemptions: how often a request lost its KV space so far.
    """

    @property
    def preemptions(self) -> int: ...

    def stream(self, req_id: str, prompt: tuple[int, ...], params: dict[str, Any]) -> AsyncIterator[Chunk]:
        """The answer, piece by piece. Closing the iterator is what a client does that goes away."""
        ...

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the stress harness's worker extension on every rank."""
        ...

    async def close(self) -> None:
        """Leave."""
        ...


class EngineClient:
    """An engine started here: vLLM's AsyncLLM with our executor."""

    def __init__(self, options: dict[str, Any], toy: bool) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.plugins import load_general_plugins
        from vllm.v1.engine.async_llm import AsyncLLM

        load_general_plugins()
        if toy:
            from vllm_handoff.stress import toy_model

            toy_model.register()
        if current_platform.is_cpu():
            options = {"dtype": "float32", "enforce_eager": True, **options}
        self.preemptions = 0
        executor = TOY_EXECUTOR if toy else EXECUTOR
        args = AsyncEngineArgs(
            **{"distributed_executor_backend": executor, "worker_extension_cls": EXTENSION, **options}
        )
        self._engine = AsyncLLM.from_engine_args(args, stat_loggers=[self._stat_logger()])

    def _stat_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        client = self

        class CountPreemptions(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
            ) -> None:
                if iteration_stats is not None:
                    client.preemptions += iteration_stats.num_preempted_reqs

            def log_engine_initialized(self) -> None:
                pass

        return CountPreemptions

    async def stream(self, req_id: str, prompt: tuple[int, ...], params: dict[str, Any]) -> AsyncIterator[Chunk]:
        outputs = self._engine.generate({"prompt_token_ids": list(prompt)}, self._params(params), req_id)
        try:
            async for output in outputs:
                completion = output.outputs[0]
                yield Chunk(list(completion.token_ids), completion.finish_reason)
        finally:
            await outputs.aclose()

    def _params(self, params: dict[str, Any]) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        values = {key: value for key, value in params.items() if key != "letters"}
        if "letters" in params:
            values["structured_outputs"] = StructuredOutputsParams(regex=f"[a-z]{{{params['letters']}}}")
        if "logit_bias" in values:
            values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
        return SamplingParams(**values, output_kind=RequestOutputKind.DELTA, detokenize=False)

    async def call(self, method: str, *args: Any) -> list[Any]:
        return await self._engine.collective_rpc(method, timeout=30, args=args)

    async def close(self) -> None:
        self._engine.shutdown()


class ServerClient:
    """A running OpenAI-compatible server, such as `vllm serve`."""

    preemptions = 0

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        self._session: Any = None

    async def stream(self, req_id: str, prompt: tuple[int, ...], params: dict[str, Any]) -> AsyncIterator[Chunk]:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0), trust_env=False
            )
        values = {key: value for key, value in params.items() if key != "letters"}
        if "letters" in params:
            values["structured_outputs"] = {"regex": f"[a-z]{{{params['letters']}}}"}
        body = {"model": self._model, "prompt": list(prompt), "stream": True, "return_token_ids": True, **values}
        headers = {"X-Request-Id": req_id}
        async with self._session.post(f"{self._url}/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                data = line.decode().removeprefix("data: ").strip()
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(f"the server answered with an error: {event['error']}")
                for choice in event.get("choices", ()):
                    yield Chunk(choice.get("token_ids") or [], choice.get("finish_reason"))

    async def call(self, method: str, *args: Any) -> list[Any]:
        return []

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
