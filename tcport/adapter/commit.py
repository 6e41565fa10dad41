"""Carries matches out: which of them may go together, the rewrite itself, and what is left behind."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule, Node

from tcport.adapter import aliasing
from tcport.adapter.emit import Emitter
from tcport.adapter.graph import GraphFacts
from tcport.adapter.names import op_name
from tcport.adapter.report import Match, Rejected, Rejection
from tcport.adapter.stand_in import stand_in
from tcport.errors import TcportError

_ASK_SIZES = frozenset({"size", "dim", "stride", "numel", "shape", "dtype", "device", "sym_size"})


def commit(gm: GraphModule, facts: GraphFacts, matches: list[Match]) -> list[Match | Rejection]:
    """Rewrite what can be rewritten.

    Args:
        gm: the graph; changed in place.
        facts: its index, from before any change.
        matches: in graph order.

    Returns:
        One record per match, in the same order: the match, or why it was not carried out after all.
    """
    records: list[Match | Rejection] = []
    kept = _exclusive(facts, matches)
    memo: dict = {}
    replaced: dict[Node, Node] = {}
    for match in matches:
        reason = kept[match]
        if reason is not None:
            records.append(Rejection(match.node, "reused", reason, match.matcher))
        elif match.build is None:
            records.append(match)
        else:
            records.append(_rewrite(facts, match, memo, replaced))
    _sweep(gm, [match for match in records if isinstance(match, Match)])
    gm.graph.lint()
    gm.recompile()
    return records


def _rewrite(facts: GraphFacts, match: Match, memo: dict, replaced: dict[Node, Node]) -> Match | Rejection:
    emit = Emitter(facts, match.node, memo, replaced)
    try:
        result = match.build(emit) if match.build is not None else None
        if result is not None:
            result = stand_in(emit, result, match.node)
    except (Rejected, TcportError) as refused:
        emit.undo()
        rule = refused.rule if isinstance(refused, Rejected) else "layout"
        reason = refused.reason if isinstance(refused, Rejected) else str(refused)
        return Rejection(match.node, rule, reason, match.matcher)
    emit.tidy(result)
    if result is not None:
        match.node.replace_all_uses_with(result)
        replaced[match.node] = result
    return match


def _exclusive(facts: GraphFacts, matches: list[Match]) -> dict[Match, str | None]:
    """For every match: None, or which use outside the matches its interior still has.

    A gather shared by several attentions goes when all of them go; so a refusal may bring about others.
    """
    refused: dict[Match, str | None] = dict.fromkeys(matches)
    while True:
        going = [match for match in matches if refused[match] is None]
        user_of = _still_needed(facts, going)
        bad = [(match, node) for match in going for node in match.interior if node in user_of]
        if not bad:
            return refused
        for match, node in bad:
            refused[match] = f"{node.name} has another user, {user_of[node].name}"


def _still_needed(facts: GraphFacts, going: list[Match]) -> dict[Node, Node]:
    """Nodes whose value the graph needs once the matches are gone, each with one user that needs it."""
    anchors = {match.node for match in going}
    interior = {node for match in going for node in match.interior}
    roots = [n for n in facts.nodes if n.op == "output" or (aliasing.is_mutation(n) and n not in interior)]
    needed: dict[Node, Node] = {}
    pending = [root for root in roots if root not in anchors]
    while pending:
        user = pending.pop()
        if op_name(user) in _ASK_SIZES:
            continue
        for node in user.all_input_nodes:
            if node not in needed:
                needed[node] = user
                if node not in anchors:
                    pending.append(node)
    for match in going:  # what the replacements themselves read is outside every interior or cannot be built
        needed.pop(match.node, None)
    return needed


def _sweep(gm: GraphModule, matches: Iterable[Match]) -> None:
    """Erase what only the replaced nodes needed."""
    done = [match for match in matches if match.build is not None]
    own = {node for match in done for node in (match.node, *match.interior, *match.carried)}
    candidates = set(own)
    pending = list(candidates)
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in candidates and node.op not in ("placeholder", "get_attr"):
                candidates.add(node)
                pending.append(node)
    for node in reversed(list(gm.graph.nodes)):
        if node in candidates and not node.users and (node in own or _is_pure(node)):
            gm.graph.erase_node(node)


def _is_pure(node: Node) -> bool:
    return op_name(node) is not None and not aliasing.is_mutation(node)
