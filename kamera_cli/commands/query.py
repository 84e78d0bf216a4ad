"""``kamera query``: answer a question over a window, with the receipt of what the answer was made of."""

from __future__ import annotations

from typing import Annotated

import typer

from kamera_cli.commands.session import Session, WindowOption, command
from kamera_cli.errors import UsageError
from kamera_cli.options import DEFAULT_WINDOW, QueryOptions, Reuse, checked_question
from kamera_cli.output.receipt import answer_view, plan_view


@command
def query(
    session: Session,
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="What to ask about the window's chunks")
    ],
    window: WindowOption = DEFAULT_WINDOW,
    chunks: Annotated[
        str | None, typer.Option("--chunks", metavar="LIST", help="Order, as in 3,1,2: numbers, names or ids")
    ] = None,
    reuse: Annotated[
        Reuse,
        typer.Option(
            "--reuse",
            help="auto computes what has no patch and keeps it; patched refuses to; blind uses chunks as stored; "
            "none computes everything",
        ),
    ] = QueryOptions.reuse,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also answer without any reuse: KL, agreement and both times")
    ] = False,
    max_kl: Annotated[
        float | None,
        typer.Option(
            "--max-kl",
            metavar="NATS",
            help="Use no patch whose measured KL is above this; auto takes 0.05 if not given",
        ),
    ] = None,
    require_hit: Annotated[
        bool, typer.Option("--require-hit", help="Exit with 3 instead of computing a chunk anew")
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", help="Length of the answer")
    ] = QueryOptions.max_new_tokens,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="0 always takes the likeliest")
    ] = QueryOptions.temperature,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Of the sampling, at a temperature above 0")
    ] = QueryOptions.seed,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            metavar="N",
            help="Use only this many columns of each patch, with --reuse patched",
        ),
    ] = None,
    place: Annotated[
        bool, typer.Option("--place", help="Put the chunks in the order that reads the least of patches")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what would be used and read, and answer nothing")
    ] = False,
) -> None:
    """Answer a question, with a receipt.

    The result is the answer, and below it the receipt: for each chunk what was used, and where the time went. -q keeps
    both and leaves out warnings; --json gives the answer by itself as "answer".
    """
    options = QueryOptions(
        window=window,
        chunks=parse_order(chunks),
        reuse=reuse,
        compare=compare,
        max_kl=max_kl,
        require_hit=require_hit,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        rank=rank,
        place=place,
    )
    if explain:
        with session.engine() as engine:
            planned = engine.explain(options)
        session.output.result(
            "query-plan", planned, lambda: plan_view(planned, given_order=options.gives_order)
        )
        return
    checked_question(question)
    with session.engine() as engine:
        result = engine.query(question, options)
    for warning in result.warnings:
        session.output.warn(warning)
    session.output.result("query", result, lambda: answer_view(result))


def parse_order(text: str | None) -> list[str] | None:
    """The chunks of ``3,1,2``; None when the window's own order is meant.

    Raises
    ------
    UsageError
        If an item between two commas is empty.
    """
    if text is None:
        return None
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise UsageError(f"--chunks {text!r} has an empty item; write for instance 3,1,2")
    return items
