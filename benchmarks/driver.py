"""One engine in a process of its own, driven by lines of JSON on stdin, answering on the file descriptor it was given.

Commands: {"load": "64x512+128", "seed": 0}, {"online": {...}, "seed": 0}, {"record": "64x512+128"}, {"stop": true}.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

from vllm_handoff.benchmarks.loads import Load, OnlineLoad


class Engine:
    """An offline vLLM engine for token-id prompts."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**options)
        self.vocab = self.llm.llm_engine.vllm_config.model_config.get_vocab_size()

    def params(self, generated: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0.0, max_tokens=generated, ignore_eos=True, detokenize=False)

    def run(self, load: Load, seed: int) -> dict[str, Any]:
        """All requests at once. Seconds, a digest of all tokens, and how many answers and tokens differ.

        The last two say how much an equal digest proves: dummy weights can repeat themselves.
        """
        prompts = [{"prompt_token_ids": ids} for ids in load.prompts(self.vocab, seed)]
        params = self.params(load.generated)
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        assert all(len(ids) == load.generated for ids in tokens)
        return {
            "seconds": seconds,
            "digest": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16],
            "distinct_answers": len(set(map(tuple, tokens))),
            "distinct_tokens": len({token for ids in tokens for token in ids}),
        }

    def run_online(self, load: OnlineLoad, seed: int) -> dict[str, Any]:
        """Requests as they arrive. Seconds, and per request the time to first token and the gaps between tokens."""
        import random

        rng = random.Random(seed)
        engine, params = self.llm.llm_engine, self.params(load.generated)
        waiting = [
            (at, str(i), [rng.randrange(10, self.vocab - 10) for _ in range(length)])
            for i, (at, length) in enumerate(load.arrivals(seed))
        ]
        waiting.reverse()
        arrived: dict[str, float] = {}
        newest: dict[str, tuple[float, int]] = {}
        first, gaps = [], []
        done: dict[str, list[int]] = {}
        begin = time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            now = time.perf_counter() - begin
            while waiting and waiting[-1][0] <= now:
                at, req_id, ids = waiting.pop()
                arrived[req_id] = at
                engine.add_request(req_id, {"prompt_token_ids": ids}, params)
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, min(0.001, waiting[-1][0] - now)))
                continue
            for output in engine.step():
                now = time.perf_counter() - begin
                count = len(output.outputs[0].token_ids)
                if output.request_id not in newest:
                    first.append(now - arrived[output.request_id])
                elif count > newest[output.request_id][1]:
                    gaps.append((now - newest[output.request_id][0]) / (count - newest[output.request_id][1]))
                newest[output.request_id] = (now, count)
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
        seconds = time.perf_counter() - begin
        digest = hashlib.sha256(json.dumps(sorted(done.items())).encode()).hexdigest()[:16]
        return {"seconds": seconds, "digest": digest, "first_token": first, "gaps": gaps}

    def record(self, load: Load, seed: int) -> Any:
        """What each rank did in each round of a run (ours only)."""
        self.llm.collective_rpc("handoff_record", args=(True,))
        self.run(load, seed)
        return self.llm.collective_rpc("handoff_record", args=(False,))


def main() -> None:
    """Serve commands until told to stop."""
    options, out = json.loads(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w", buffering=1)

    def answer(value: Any) -> None:
        out.write(json.dumps(value) + "\n")

    begin = time.perf_counter()
    engine = Engine(options)
    answer({"ready": time.perf_counter() - begin})
    for line in sys.stdin:
        command = json.loads(line)
        seed = command.get("seed", 0)
        if "load" in command:
            answer(engine.run(Load.parse(command["load"]), seed))
        elif "online" in command:
            answer(engine.run_online(OnlineLoad(**command["online"]), seed))
        elif "record" in command:
            answer(engine.record(Load.parse(command["record"]), seed))
        else:
            break
    answer({"stopped": True})


if __name__ == "__main__":
    main()
