"""What the layout promises of any unit: sections, order, alignment, spans, planes without gaps or overlaps."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from layerferry.layout import (
    BLOCK_ELEMENTS,
    FP32_PLANE,
    GRAD_PLANE,
    RESIDUE_PLANE,
    SECTION_DTYPES,
    WEIGHT_PLANE,
    Layout,
    ParameterSpec,
    PlaneSpec,
)

ALIGNED_BYTES = 256
NARROWEST = 2
"""Bytes of an element of the narrowest plane that every parameter has."""


@st.composite
def parameters(draw: st.DrawFn) -> list[ParameterSpec]:
    shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
    return [
        ParameterSpec(
            name=f"p{number}",
            shape=draw(shapes),
            dtype=draw(st.sampled_from(SECTION_DTYPES)),
            decays=draw(st.booleans()),
            trained=draw(st.booleans()),
        )
        for number in range(draw(st.integers(1, 12)))
    ]


def rank(spec: ParameterSpec) -> tuple[int, int]:
    """Section, and kind within it: decayed, other trained, frozen."""
    return SECTION_DTYPES.index(spec.dtype), 2 if not spec.trained else int(not spec.decays)


@given(parameters())
def test_sections_hold_decayed_then_other_then_frozen_parameters_in_the_given_order(given: list[ParameterSpec]) -> None:
    layout = Layout.of(given)
    assert [entry.name for entry in layout.entries] == [spec.name for spec in sorted(given, key=rank)]  # sorting is stable
    assert layout.numel == sum(torch.Size(spec.shape).numel() for spec in given)
    assert layout.num_trained == sum(torch.Size(spec.shape).numel() for spec in given if spec.trained)


@given(parameters())
def test_parameters_begin_aligned_and_fill_their_section_without_gaps(given: list[ParameterSpec]) -> None:
    layout = Layout.of(given)
    for section, length in zip(SECTION_DTYPES, layout.section_numel, strict=True):
        cursor = 0
        for entry in (entry for entry in layout.entries if entry.dtype == section):
            assert entry.offset == cursor and entry.offset * NARROWEST % ALIGNED_BYTES == 0
            assert entry.numel <= entry.padded_numel < entry.numel + ALIGNED_BYTES // NARROWEST
            cursor += entry.padded_numel
        assert cursor == length and length % BLOCK_ELEMENTS == 0


@given(parameters())
def test_spans_cover_what_is_trained_and_nothing_else(given: list[ParameterSpec]) -> None:
    layout = Layout.of(given)
    assert len(layout.spans) <= 4
    covered = {(span.dtype, element): span.decays for span in layout.spans for element in range(span.start, span.stop)}
    assert len(covered) == sum(span.stop - span.start for span in layout.spans) == sum(layout.trained_numel)
    for entry in layout.entries:
        for element in (entry.offset, entry.offset + entry.padded_numel - 1):
            assert covered.get((entry.dtype, element)) == (entry.decays if entry.trained else None)


@given(parameters())
def test_planes_are_as_long_as_what_they_hold(given: list[ParameterSpec]) -> None:
    """Frozen parameters have a weight alone; places in a plane touch and do not overlap."""
    layout = Layout.of(given)
    (bf16, fp32), (trained_bf16, trained_fp32) = layout.section_numel, layout.trained_numel
    assert layout.bytes(WEIGHT_PLANE) == 2 * bf16 + 4 * fp32
    assert layout.bytes(GRAD_PLANE) == 2 * trained_bf16 + 4 * trained_fp32
    assert layout.bytes(RESIDUE_PLANE) == 2 * trained_bf16
    assert layout.bytes(FP32_PLANE) == 4 * (trained_bf16 + trained_fp32)
    coded = PlaneSpec((torch.uint8, torch.uint8), coded=True)
    assert layout.bytes(coded) == sum(numel + numel // BLOCK_ELEMENTS for numel in layout.trained_numel)
    for plane in (WEIGHT_PLANE, GRAD_PLANE, RESIDUE_PLANE, FP32_PLANE):
        places = [place for entry in layout.entries if (place := layout.place(entry, plane)) is not None]
        assert [place.start for place in places] == [0, *(place.stop for place in places)][: len(places)]
        assert sum(place.stop - place.start for place in places) == layout.bytes(plane)
