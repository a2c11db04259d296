"""Who waits for whom, for what and since when: in words, before anybody has to ask. Facts in, text out."""

from collections.abc import Sequence

from jaxrdma.control import ProcessStatus

# Who was not heard for longer than this is said to be silent: heartbeats are at most half as far apart.
_SILENT_SECONDS = 15.0


def explain(
    waiting: Sequence[ProcessStatus],
    late: Sequence[ProcessStatus],
    servers: Sequence[ProcessStatus],
    known: Sequence[str] = (),
) -> str:
    """One paragraph on a job in which a step takes long.

    **Arguments:**

    - `waiting`: the workers that are in a step, at least one.
    - `late`: whoever's gradients those steps lack, and is in none. Empty: the servers have them all.
    - `servers`: every server.
    - `known`: what else is known of who did not do what those steps need.
    """
    return ". ".join(filter(None, [_who_waits(waiting, late, servers), "; ".join(known)]))


def _who_waits(
    waiting: Sequence[ProcessStatus],
    late: Sequence[ProcessStatus],
    servers: Sequence[ProcessStatus],
) -> str:
    text = "; ".join(_wait_text(each) for each in waiting)
    if late:
        return f"{text}. The step lacks the gradients of {'; '.join(_text(each) for each in late)}"
    wanted: dict[
        int, int
    ] = {}  # by server that is asked, the earliest step of which an answer is awaited
    for each in waiting:
        if each.wait is not None:
            earlier = wanted.get(each.wait.server, each.wait.step)
            wanted[each.wait.server] = min(earlier, each.wait.step)
    # A server says what it lacks where it is at, and may be another than the one that is waited for longest.
    concerned = [i for i, each in enumerate(servers) if i in wanted or each.doing]
    texts = [_server_text(servers[i], wanted.get(i)) for i in concerned or range(len(servers))]
    return f"{text}. No worker is waited for: {'; '.join(texts)}"


def _server_text(server: ProcessStatus, wanted: int | None) -> str:
    if wanted is None or server.step <= wanted:
        return _text(server)
    return f"{_text(server)}: it has answered step {wanted}, and the answer is lost, or on its way"


def _wait_text(waiting: ProcessStatus) -> str:
    wait = waiting.wait
    step = f"step {wait.step if wait is not None else waiting.step}"
    text = f"{waiting.name} ({_place(waiting)}) has waited {waiting.seconds:.0f} s in {step}"
    if wait is None:
        return text
    return f"{text} of model {wait.flow}, longest for partition {wait.partition} at server {wait.server} ({wait.stage})"


def _text(process: ProcessStatus) -> str:
    text = f"{process.name} ({_place(process)}), {process.state or 'with no word'} for {process.seconds:.0f} s"
    if process.doing:
        text += f" ({process.doing})"
    if process.silent > _SILENT_SECONDS:
        text += f", not heard for {process.silent:.0f} s"
    last = f"last at step {process.step}" if process.step >= 0 else "with no step reported yet"
    return f"{text}, {last}"


def _place(process: ProcessStatus) -> str:
    return f"{process.host}, pid {process.pid}"
