"""The report and the plan are one: sums, formulas, JSON, picture, policies."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree
from dataclasses import replace
from fractions import Fraction

import pytest

from agens_engine.commands.plan_view import make_console, render_line, render_plan
from agens_planner import (
    MemoryPlan,
    ModelShapes,
    PlannerInputError,
    PlanOptions,
    PlanRefused,
    Profile,
    load_profile,
    plan,
)
from agens_planner.formula import Formula
from agens_planner.lines import DEVICE, HOST_PAGEABLE, HOST_PINNED, LINES, describe
from agens_planner.svg import grouped, to_svg


@pytest.fixture(params=[("16gb", True), ("16gb", False), ("24gb", True)])
def found(request: pytest.FixtureRequest, shapes: ModelShapes) -> MemoryPlan:
    name, images = request.param
    return plan(shapes, load_profile(name), options=PlanOptions(drafter=True, mtp=True, images=images))


def evaluate(text: str) -> int:
    """Read a formula's words back: the number that leads each factor, labels and remarks in brackets ignored."""
    while (bare := re.sub(r"\([^()]*\)", "", text)) != text:
        text = bare
    total = Fraction(0)
    for sign, term in re.findall(r"(^|[+−] )([^+−]+)", text):
        product = Fraction(1)
        for factor in term.split("×"):
            number = re.match(r"\s*([\d,.]+(?:/\d+)?)", factor)
            assert number, factor
            product *= (
                Fraction(number.group(1).replace(",", ""))
                if "/" in number.group(1)
                else Fraction(number.group(1).replace(",", "").rstrip("."))
            )
        total += -product if sign.startswith("−") else product
    return math.ceil(total)


def test_every_formula_evaluates_to_its_bytes(found: MemoryPlan) -> None:
    for line in found.lines:
        assert evaluate(line.formula) == line.bytes, (line.name, line.formula)


def test_every_line_is_described_once_and_placed(found: MemoryPlan) -> None:
    names = [line.name for line in found.lines]
    assert len(names) == len(set(names))
    for line in found.lines:
        assert describe(line.name)
        assert line.place in (DEVICE, HOST_PINNED, HOST_PAGEABLE)
        assert (line.place == DEVICE) == (not line.name.startswith("host."))


def test_every_kind_of_line_occurs_somewhere(shapes: ModelShapes, profile16: Profile) -> None:
    """A name in the table that no plan can contain would be a lie."""
    from agens_planner import DeviceFacts

    full = PlanOptions(drafter=True, mtp=True, images=True)
    busy = DeviceFacts("cuda", "card", 16 * 2**30, 2**26)
    plans = [
        plan(shapes, profile16.replace(far_resident_layers=1, fp8_dense="on"), busy, options=full),
        plan(shapes, load_profile("24gb"), options=full),
        plan(shapes, load_profile("cpu").replace(cap_bytes="2TiB", head_bits=4)),
    ]
    seen = {line.name for p in plans for line in p.lines}
    bases = {name if name in LINES else name.rpartition(".")[0] for name in seen}
    assert set(LINES) - bases == set()


def test_lines_sum_to_the_totals_and_json_repeats_them(found: MemoryPlan) -> None:
    document = json.loads(json.dumps(found.to_json()))
    assert (
        sum(x["bytes"] for x in document["lines"] if x["place"] == "device") == document["device"]["planned_peak_bytes"]
    )
    assert sum(x["bytes"] for x in document["lines"] if x["place"] != "device") == document["host"]["planned_bytes"]
    assert (
        document["device"]["planned_peak_bytes"] <= document["device"]["limit_bytes"] <= document["device"]["cap_bytes"]
    )
    for key in ("fits", "context_tokens", "sequences", "binding_line", "step", "roofline"):
        assert key in document
    assert set(document["step"]) >= {"bytes_read", "bus_bytes"}
    assert all(r["step_seconds"] > 0 and r["tokens_per_second"] > 0 for r in document["roofline"].values())


def test_table_shows_every_line_of_the_json(found: MemoryPlan) -> None:
    from agens_planner import format_size

    console = make_console()
    with console.capture() as capture:
        console.print(render_plan(found))
    rows = [row for row in capture.get().splitlines()]
    for line in found.lines:
        row = next((r for r in rows if r.startswith(f"  {line.name} ")), "")
        assert format_size(line.bytes) in row, line.name
    assert format_size(found.planned_peak_bytes) in capture.get()
    for policy in found.policies:
        assert policy.value in capture.get()


def test_explain_shows_formula_and_rejects_unknown_names(found: MemoryPlan) -> None:
    console = make_console()
    with console.capture() as capture:
        console.print(render_line(found, "kv.dense"))
    assert "dense layers" in capture.get()
    assert f"{found.bytes_of('kv.dense'):,}" in capture.get()
    with pytest.raises(PlannerInputError, match=r"did you mean kv\.dense"):
        render_line(found, "kv.dens")


def test_svg_is_well_formed_and_complete(found: MemoryPlan) -> None:
    text = to_svg(found)
    root = xml.etree.ElementTree.fromstring(text)
    titles = [e.text or "" for e in root.iter() if e.tag.endswith("title")]
    groups = grouped(found.device_lines)
    assert sum(size for _, size, _ in groups) == found.planned_peak_bytes
    for label, _, _ in groups:
        assert any(title.startswith(label + ":") for title in titles)


def test_policies_are_reported_in_the_stated_order(shapes: ModelShapes, profile16: Profile) -> None:
    names = [p.name for p in plan(shapes, profile16, options=PlanOptions(drafter=True, images=True)).policies]
    ladder = ["far pools on the device", "vision tower", "prefill chunk", "far pool and block keys", "dense KV"]
    assert names[:5] == ladder
    assert "output head" in names and "drafter linears" in names


def test_policies_are_given_up_in_order(shapes: ModelShapes, profile16: Profile) -> None:
    """Shrinking the cap never takes back an earlier concession, and quality goes last."""
    seen = []
    for cap in range(16 * 1024, 11 * 1024, -64):
        profile = profile16.replace(cap_bytes=f"{cap}MiB")
        try:
            c = plan(shapes, profile, options=PlanOptions(context_tokens=65_536, images=True)).choice
        except PlanRefused:
            break
        rank = (c.vision_staged, -c.chunk_tokens, c.fp8_far, c.fp8_dense)
        seen.append(rank)
        if c.fp8_dense:
            assert c.fp8_far
        if c.fp8_far:
            assert c.chunk_tokens == profile.chunk_tokens_min and c.vision_staged
        if c.chunk_tokens < profile.chunk_tokens_max:
            assert c.vision_staged
    assert seen == sorted(seen)
    assert len(set(seen)) >= 5  # resident, staged, two smaller chunks, fp8


def test_a_plan_that_nothing_binds_names_no_line(shapes: ModelShapes, profile16: Profile) -> None:
    roomy = profile16.replace(cap_bytes="80GiB")
    asked = plan(shapes, roomy, options=PlanOptions(context_tokens=1_024, sequences=2))
    assert asked.to_json()["binding_line"] == "limit.request"
    assert plan(shapes, roomy, options=PlanOptions(sequences=2)).binding_line == "limit.model_context"
    searched = plan(shapes, profile16.replace(cap_bytes="14GiB"))
    assert searched.context_tokens < searched.max_context_tokens
    assert searched.bytes_of(searched.binding_line) > 0
    # the same sizes, asked for: one page more still does not fit, so the line still binds
    again = PlanOptions(context_tokens=searched.context_tokens, drafter=True)
    assert plan(shapes, profile16.replace(cap_bytes="14GiB"), options=again).binding_line == searched.binding_line


def test_chunks_are_whole_blocks_of_the_sparse_layers(shapes: ModelShapes, profile16: Profile) -> None:
    def found(least: int, most: int) -> MemoryPlan:
        profile = profile16.replace(chunk_tokens_min=least, chunk_tokens_max=most)
        return plan(shapes, profile, options=PlanOptions(context_tokens=4_096))

    assert shapes.dims.compress == 4
    odd = found(17, 17)
    assert odd.choice.chunk_tokens == 16
    reason = next(p for p in odd.policies if p.name == "prefill chunk")
    assert (reason.value, reason.reason) == ("16 tokens", "set by the profile, in whole blocks of 4")
    assert found(18, 1_002).choice.chunk_tokens == 1_000
    even = next(p for p in found(16, 16).policies if p.name == "prefill chunk")
    assert even.reason == "set by the profile"


def test_the_ring_holds_a_verify_step_when_the_chunk_is_shorter(shapes: ModelShapes, profile16: Profile) -> None:
    """The engine's ring is window + the longer of a chunk and (block + 8 verify rows)."""
    wide = replace(shapes, dims=replace(shapes.dims, compress=16, window=4_096))
    for compress, chunk, written in ((16, 16, 24), (16, 32, 32), (4, 16, 16)):
        model = replace(wide, dims=replace(wide.dims, compress=compress))
        profile = profile16.replace(chunk_tokens_min=chunk, chunk_tokens_max=chunk)
        ring = plan(model, profile, options=PlanOptions(context_tokens=65_536)).bytes_of("kv.window")
        assert ring == 17 * (4_096 + written) * 4_096, (compress, chunk)


def test_formula_text_and_value() -> None:
    formula = Formula.of((3, "layers"), (Fraction("2.82"), "bits"), (Fraction(1, 8), "byte")) + Formula.of(
        (-1, ""), (1, "shared byte")
    )
    assert formula.value == 1  # 3 × 2.82 / 8 − 1 = 0.0575, rounded up
    assert formula.text() == "3 layers × 2.82 bits × 1/8 byte − 1 shared byte"
    assert Formula.of((0, "tokens"), (5, "bytes")).text() == "nothing"
