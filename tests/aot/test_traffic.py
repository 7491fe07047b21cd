"""Reading a compiled TPU program: bytes through HBM, buffers reused, and what it may not hold."""

import pytest

from jax_bridge.aot.hlo import Program, all_bytes, forbidden, hbm_bytes, read_aliases
from jax_bridge.aot.traffic import hbm_traffic


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("f8e4m3fn[8,128]{1,0:T(8,128)}", 1024), ("f8e5m2fnuz[3]", 3), ("f4e2m1fn[6]", 3), ("s4[6]", 3),
        ("pred[5]", 5), ("(c64[2], u16[3], f8e8m0fnu[8], token[])", 30),
    ],
)  # fmt: skip
def test_a_type_takes_the_bits_of_its_format(kind, size):
    assert all_bytes(kind) == size


def test_a_type_of_no_known_size_is_an_error():
    with pytest.raises(ValueError, match=r"f6e3m2fn\[8\]: no element type of HLO"):
        all_bytes("f6e3m2fn[8]")


SHAPES = [("bf16", "2,8,2,128"), ("bf16", "2,8,2048,128"), ("s32", "2,1,2048")]
PROGRAM = """\
HloModule jit_step, input_output_alias={ {0}: (2, {}, may-alias), {1}: (0, {}, may-alias) }

%fused (p.0: bf16[64,8], p.1: bf16[2,8], p.2: s32[]) -> bf16[64,8] {
  %p.0 = bf16[64,8]{1,0:T(8,128)} parameter(0)
  %p.1 = bf16[2,8]{1,0:T(8,128)S(1)} parameter(1)
  %p.2 = s32[]{:T(128)S(6)} parameter(2)
  ROOT %dus.1 = bf16[64,8]{1,0:T(8,128)} dynamic-update-slice(%p.0, %p.1, %p.2, %p.2)
}

%body (p.3: (s32[], f32[10])) -> (s32[], f32[10]) {
  %p.3 = (s32[]{:S(6)}, f32[10]{0:T(128)}) parameter(0)
  %n.1 = s32[]{:S(6)} get-tuple-element(%p.3), index=0
  %x.1 = f32[10]{0:T(128)} get-tuple-element(%p.3), index=1
  %y.1 = f32[10]{0:T(128)} add(%x.1, %x.1)
  ROOT %r.1 = (s32[]{:S(6)}, f32[10]{0:T(128)}) tuple(%n.1, %y.1)
}

ENTRY %main (a: bf16[64,8], b: f32[100], c: s32[]) -> bf16[64,8] {
  %a.1 = bf16[64,8]{1,0:T(8,128)} parameter(0)
  %b.1 = f32[100]{0:T(128)} parameter(1)
  %c.1 = s32[]{:T(128)S(6)} parameter(2)
  %cs.1 = (f32[100]{0:T(128)S(1)}, f32[100]{0:T(128)}, u32[]{:S(2)}) copy-start(%b.1)
  %cd.1 = f32[100]{0:T(128)S(1)} copy-done(%cs.1)
  %use.1 = f32[10]{0:T(128)} slice(%cd.1), slice={[0:10]}
  %t.1 = (s32[]{:S(6)}, f32[10]{0:T(128)}) tuple(%c.1, %use.1)
  %w.1 = (s32[]{:S(6)}, f32[10]{0:T(128)}) while(%t.1), condition=%cond, body=%body
  %rows.1 = bf16[2,8]{1,0:T(8,128)S(1)} constant({...})
  ROOT %out.1 = bf16[64,8]{1,0:T(8,128)} fusion(%a.1, %rows.1, %c.1), kind=kLoop, calls=%fused
}
"""


def test_traffic_counts_hbm_once_and_in_place_writes_as_what_they_write():
    prefetch, sliced, body, update = 400, 40, 3 * 40, 2 * 8 * 2
    assert hbm_traffic(Program(PROGRAM)) == prefetch + sliced + body + update


def test_aliases_are_read_by_path():
    assert read_aliases(PROGRAM, ["a", "b", "c"], ["x", "y"]) == {"x": "c", "y": "a"}


def traffic(*lines: str, other: str = "") -> int:
    """HBM bytes of an entry computation with 4-byte arrays %a and %w [100] in HBM, %v [100] in VMEM."""
    head = ["a", "w", "v"]
    parameters = [
        f"  %{name} = f32[100]{{0:T(128){'S(1)' * (name == 'v')}}} parameter({index})"
        for index, name in enumerate(head)
    ]
    body = [*parameters, *(f"  {line}" for line in lines), "}"]
    entry = "\n".join(["ENTRY %main (a: f32[100]) -> f32[100] {", *body])
    return hbm_traffic(Program(f"HloModule step\n\n{other}\n{entry}\n"))


HBM, VMEM = "f32[100]{0:T(128)}", "f32[100]{0:T(128)S(1)}"
ROWS, FEW = "f32[10]{0:T(128)}", "f32[10]{0:T(128)S(1)}"


KERNEL, ALIASING = 'custom_call_target="tpu_custom_call"', ", output_to_operand_aliasing="
LAYOUT = ", operand_layout_constraints={f32[100]{0}, f32[100]{0}}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{HBM} custom-call(%a, %w), {KERNEL}", 1200),
        # A paged pool: read by the kernel, extended in place, and the rows that come out of it.
        (f"({ROWS}, {HBM}) custom-call(%v, %w), {KERNEL}{LAYOUT}{ALIASING}{{{{1}}: (1, {{}})}}", 440),
        (
            f"({HBM}, {HBM}) custom-call(%a, %w), {KERNEL}{ALIASING}{{{{0}}: (0, {{}}), {{1}}: (1, {{}})}}",
            800,
        ),
        (f"{HBM} custom-call(%a), {KERNEL}{ALIASING}{{{{}}: (0, {{}})}}", 400),
        (f'{HBM} custom-call(), custom_call_target="AllocateBuffer"', 0),
    ],
    ids=["plain", "one aliased", "both aliased", "the only result aliased", "room"],
)
def test_custom_calls_count_an_aliased_buffer_once(line, expected):
    assert traffic(f"%k = {line}") == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([f"%s = ({VMEM}, {HBM}, u32[]{{:S(2)}}) copy-start(%a)", f"%d = {VMEM} copy-done(%s)"], 400),
        ([f"%s = ({HBM}, {VMEM}, u32[]{{:S(2)}}) copy-start(%v)", f"%d = {HBM} copy-done(%s)"], 400),
        ([f"%s = ({HBM}, {HBM}, u32[]{{:S(2)}}) copy-start(%a)", f"%d = {HBM} copy-done(%s)"], 800),
        (
            [f"%s = (({HBM}), {FEW}, s32[]) slice-start(%a), slice={{[0:10]}}", f"%d = {FEW} slice-done(%s)"],
            40,
        ),
        (
            [f"%s = (({HBM}), {FEW}, s32[]) async-start(%a), calls=%cut"]
            + [f"%u = {FEW} async-update(%s)", f"%d = {FEW} async-done(%u)"],
            40,
        ),
        ([f"%s = {HBM} all-reduce-start(%a), to_apply=%sum", f"%d = {HBM} all-reduce-done(%s)"], 800),
        ([f"%s = ({ROWS}, {HBM}) all-gather-start(%a)", f"%d = {HBM} all-gather-done(%s)"], 800),
        ([f"%r = {HBM} all-reduce(%v), to_apply=%sum"], 400),
        ([f"%c = {ROWS} call(%a), to_apply=%cut"], 80),
    ],
    ids=["fetch", "write back", "copy", "slice", "async", "all-reduce", "all-gather", "from VMEM", "call"],
)
def test_asynchronous_pairs_count_what_they_stand_for(lines, expected):
    kind = ROWS if "call" in lines[-1] else FEW
    cut = f"%cut (p: f32[100]) -> f32[10] {{\n  %p = {HBM} parameter(0)\n"
    cut += f"  ROOT %s.1 = {kind} slice(%p), slice={{[0:10]}}\n}}\n"
    assert traffic(*lines, other=cut) == expected


FETCH = [f"%s = ({VMEM}, {HBM}, u32[]{{:S(2)}}) copy-start(%a), cross_program_prefetch_index=0"]
FETCH += [f"%d = {VMEM} copy-done(%s)", f"%u = {VMEM} negate(%d)"]
FETCH_AGAIN = [f"%t = ({VMEM}, {HBM}, u32[]{{:S(2)}}) copy-start(%a)", f"%e = {VMEM} copy-done(%t)"]


@pytest.mark.parametrize(
    ("lines", "copies"),
    [
        (FETCH, 1),
        (FETCH + FETCH_AGAIN, 1),
        ([*FETCH, *FETCH_AGAIN, f"%x = {VMEM} negate(%e)"], 2),
        (FETCH + [line.replace("%a", "%w") for line in FETCH_AGAIN], 2),
        ([*[line.partition(", cross_program")[0] for line in FETCH], *FETCH_AGAIN], 2),
    ],
    ids=["alone", "for the next run", "for a use of its own", "of another weight", "without the mark"],
)
def test_a_weight_fetched_for_the_next_run_is_counted_once(lines, copies):
    assert traffic(*lines) == copies * 400


FUSED = """\
%fused (p.0: f32[100], p.1: f32[100]) -> (f32[10], f32[100]) {
  %p.0 = f32[100]{0} parameter(0)
  %p.1 = f32[100]{0} parameter(1)
  %c.0 = bf16[100]{0} convert(%p.0)
  %s.0 = bf16[10]{0} slice(%c.0), slice={[0:10]}
  %x.0 = f32[10]{0} convert(%s.0)
  %u.0 = f32[100]{0} dynamic-update-slice(%p.1, %x.0)
  ROOT %t.0 = (f32[10]{0}, f32[100]{0}) tuple(%x.0, %u.0)
}
"""


def test_a_fusion_reads_slices_through_conversions_and_updates_in_place_beside_other_results():
    line = f"%f = ({ROWS}, {HBM}) fusion(%a, %w), kind=kLoop, calls=%fused"
    assert traffic(line, other=FUSED) == 40 + (40 + 40)
    in_vmem = line.replace(f"({ROWS}", "(f32[10]{0:T(128)S(1)}").replace("%a,", "%v,")
    assert traffic(in_vmem, other=FUSED) == 40


def test_every_gathered_row_is_read():
    line = "%g = f32[30,10]{1,0} gather(%a, %i), offset_dims={1}"
    assert traffic("%i = s32[30]{0:S(1)} iota()", line) == 2 * 1200
    fused = (
        "%fused (p.0: f32[100], p.1: s32[30]) -> f32[10] {\n"
        "  %p.0 = f32[100]{0} parameter(0)\n  %p.1 = s32[30]{0} parameter(1)\n"
        "  %g.0 = f32[30,10]{1,0} gather(%p.0, %p.1), offset_dims={1}\n"
        "  ROOT %r.0 = f32[10]{0} reduce(%g.0), to_apply=%sum\n}\n"
    )
    call = f"%f = {ROWS} fusion(%a, %i), kind=kLoop, calls=%fused"
    assert traffic("%i = s32[30]{0:S(1)} iota()", call, other=fused) == 1200 + 40


COND = """
%cond (p: (s32[], f32[10])) -> pred[] {
  %p.9 = (s32[]{:S(6)}, f32[10]{0:T(128)}) parameter(0)
  %i.9 = s32[]{:S(6)} get-tuple-element(%p.9), index=0
  %n.9 = s32[]{:T(128)} constant(5)
  ROOT %lt.9 = pred[] compare(%i.9, %n.9), direction=LT
}

ENTRY"""


def test_a_loop_repeats_as_often_as_is_known():
    assert PROGRAM.count("ENTRY") == 1
    once = hbm_traffic(Program(PROGRAM))
    assert hbm_traffic(Program(PROGRAM.replace("ENTRY", COND))) == once + 4 * 120
    depends = PROGRAM.replace("ENTRY", COND.replace("constant(5)", "get-tuple-element(%p.9), index=1"))
    assert hbm_traffic(Program(depends)) == once


def test_collectives_are_counted_by_kind():
    lines = [
        f"  %s.{i} = {HBM} {op}(%a)"
        for i, op in enumerate(["all-reduce", "all-reduce-start", "all-reduce-done", "reduce-scatter", "add"])
    ]
    text = "\n".join(["ENTRY %main (a: f32[100]) -> f32[100] {", *lines, "}"])
    assert Program(text).collectives() == {"all-reduce": 2, "reduce-scatter": 1}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("  %x = f32[<=8,4]{1,0} add(%a, %b)", ["dynamic shape"]),
        ("  %x = f64[] add(%a, %b)", ["64-bit float"]),
        ("  %x = (f32[], token[]) infeed(%a)", ["host transfer"]),
        ('  %x = f32[] custom-call(), custom_call_target="xla_python_cpu_callback"', ["host callback"]),
        ('  %x = f32[8]{0} custom-call(), custom_call_target="tpu_custom_call"', []),
        ("  %x = s64[2]{0} add(%a, %b)", []),
    ],
)
def test_what_a_step_may_not_hold_is_named(line, found):
    assert forbidden(line) == found


def test_sizes_of_types():
    kind = "(bf16[2,3]{1,0:T(8,128)}, pred[4]{0:S(1)}, f8e4m3fn[8]{0}, s4[8]{0})"
    assert all_bytes(kind) == 12 + 4 + 8 + 4 and hbm_bytes(kind) == 12 + 8 + 4


def test_the_kernel_for_static_caches_reads_the_blocks_in_use():
    query, cache, at = (f"{kind}[{shape}]{{0:T(128)}}" for kind, shape in SHAPES)
    call = f"""\
HloModule step

ENTRY %main (q: f32[1]) -> f32[1] {{
  %s.1 = s32[2]{{0:T(128)S(6)}} parameter(0)
  %q.1 = {query} parameter(1)
  %k.1 = {cache} parameter(2)
  %at.1 = {at} parameter(3)
  ROOT %block_attention.3 = {query} custom-call(%s.1, %s.1, %q.1, %q.1, %q.1, %k.1, %k.1, %at.1)
}}
"""
    rows, slots = 4 * 2 * 8 * 2 * 128 * 2, 2 * 2 * 8 * 2048 * 128 * 2 + 2 * 2048 * 4
    for context, share in ((None, 1), (2048, 1), (9999, 1), (1100, 3 / 4), (1024, 1 / 2), (160, 1 / 4)):
        assert hbm_traffic(Program(call, context)) == rows + slots * share
