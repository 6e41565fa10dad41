"""What the report says of one node's chain."""

from __future__ import annotations

import torch.fx

from tcport import quarantine
from tcport.chain import survivors
from tcport.device import DeviceProfile
from tcport.logs import logger
from tcport.lowering.candidate import Candidate
from tcport.lowering.operators import NodeChoice
from tcport.report import NodeReport, Rejected

_said: set[str] = set()


def node_report(node: torch.fx.Node, choice: NodeChoice, chosen: Candidate | None = None, why: str = "") -> NodeReport:
    """The kernel of a node, the links behind it, and every kernel that was left with the reason.

    Args:
        chosen: the link that was taken, and why; None: the first of the chain.

    Raises:
        KernelBuildError: see :func:`tcport.chain.survivors`.
    """
    chain = survivors(choice)
    chosen = chosen or chain[0]
    chain.sort(key=lambda link: link != chosen)
    rejected = [Rejected(r.kernel, r.reason, str(r.config) if r.config else "") for r in choice.selection.rejections]
    for kernel, reason in quarantine.reasons(choice).items():
        failure = f"{reason.cause}: {reason.error}: {reason.message}"
        rejected.append(Rejected(kernel.kernel, failure, str(kernel.config) if kernel.config else ""))
    report = NodeReport(
        node=node.name,
        op=choice.operator.name,
        device=_device_line(choice.profile),
        kernel=chosen.kernel,
        tier=chosen.tier,
        tile=str(chosen.config) if chosen.config else "",
        why=why or chosen.why,
        chain=tuple(map(str, _brief(chain))),
        rejected=tuple(rejected),
        footprint=chosen.footprint,
    )
    _say(f"{report.op} on {report.device}: {', then '.join(report.chain)}")
    return report


def _brief(chain: list[Candidate]) -> list[Candidate]:
    """The links that bring in a kernel, and the last one: of pairs there is one for each two kernels."""
    seen: set[Candidate] = set()
    brief = []
    for link in chain:
        if link is chain[-1] or not seen.issuperset(link.kernels):
            brief.append(link)
        seen.update(link.kernels)
    return brief


def _device_line(profile: DeviceProfile) -> str:
    return f"{profile.name or profile.arch or profile.vendor}" + (" (basic mode)" if profile.basic_mode else "")


def _say(line: str) -> None:
    """Log a choice once: every layer and every graph of a model makes the same one."""
    if line not in _said:
        _said.add(line)
        logger("chain").info("%s", line)
