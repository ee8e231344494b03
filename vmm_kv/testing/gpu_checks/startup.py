"""The whole start-up, as an engine makes it."""

from __future__ import annotations

from dataclasses import asdict

from vmm_kv.demo.run import DemoOptions, run_demo
from vmm_kv.testing.gpu_registry import check
from vmm_kv.testing.gpu_rig import GIB, MIB, Rig

_PROOFS = ("tokens_match", "logits_match", "addresses_stable")


def _startup(rig: Rig, backing: str) -> None:
    run = run_demo(DemoOptions(device=rig.name, backing=backing))
    result = run.result
    rig.findings.details.update(asdict(result), phases=run.report.phases, later=run.later)
    rig.say(
        f"{result.final_blocks} blocks, {run.report.mapped_bytes / GIB:.2f} GiB, over {result.profile_blocks}; "
        f"{result.graphs} graphs kept {result.footprint_bytes / MIB:.1f} MiB; "
        f"{result.tokens_generated} tokens in {result.seconds:.1f} s"
    )
    wrong = [name for name in _PROOFS if not getattr(result, name)]
    rig.require(not wrong, f"false: {', '.join(wrong)}")
    rig.expect("blocks were written beyond the profile", result.distinct_blocks_written > result.profile_blocks, True)


for _backing in ("prefix", "alias"):

    @check(f"startup.{_backing}", "1 4 7 9 10 13", needs="torch", alone=True, seconds=75)
    def startup(rig: Rig, backing: str = _backing) -> None:
        """The whole start-up with the demo's engine: sized, committed, served, and compared with an ordinary cache."""
        _startup(rig, backing)
