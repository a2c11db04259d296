"""What each value of a traced computation depends on, leaf by leaf, and running it on pieces of leaves.

A jaxpr is flattened to a `Program` (calls are inlined, `cond` keeps its branches). `classify` finds for
every value which leaves it depends on, and how:

- UNIFORM: on no leaf, and all its elements are equal (a learning rate, a step count, zeros);
- ELEMENTWISE: each element on the element of one leaf at the same place, and on uniform values;
- WHOLE: on a leaf in any other way, on several leaves, or on the place (noise, a table of constants).

A computation whose results are ELEMENTWISE means the same on any piece of its leaves, so `evaluate` can
run it on flat pieces: uniform values are kept as scalars, and shapes lose their meaning. The jaxpr is
never traced again, because code such as `mask=lambda p: p.ndim > 1` would decide otherwise on a piece.
JAX is imported only inside functions.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

UNIFORM, ELEMENTWISE, WHOLE = 0, 1, 2

# Calls that are replaced by their body, and the parameter that holds it.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}

# These only give a value another shape: the order of its elements stays.
_SHAPE_ONLY = {"reshape", "squeeze", "expand_dims", "broadcast_in_dim"}

# Element e of the result depends on element e of each operand alone.
_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge
    gt igamma igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg
    nextafter not or polygamma population_count pow real reduce_precision regularized_incomplete_beta rem
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    sub tan tanh xor zeta
    """.split()
)


class Class(NamedTuple):
    """How a value depends on leaves. `leaves` is a bit mask; a union of classes is the least upper bound."""

    level: int
    leaves: int

    def __or__(self, other: "Class") -> "Class":  # type: ignore[override]
        leaves = self.leaves | other.leaves
        level = max(self.level, other.level)
        if level == ELEMENTWISE and leaves.bit_count() > 1:
            level = WHOLE
        return Class(level, leaves)

    @property
    def leaf(self) -> int:
        """The only leaf it depends on, or -1 for none."""
        return self.leaves.bit_length() - 1


UNIFORM_CLASS = Class(UNIFORM, 0)


@dataclass(frozen=True)
class Value:
    """A value of a program: its abstract value, and what it is where it is a constant."""

    aval: Any
    constant: Any = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.aval.shape)


@dataclass(frozen=True)
class Node:
    """One primitive: `inputs` and `outputs` are indices of values; a `cond` has its branches as programs."""

    equation: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    branches: tuple["Program", ...] = ()

    @property
    def name(self) -> str:
        """Of the primitive."""
        return self.equation.primitive.name


@dataclass
class Program:
    """A jaxpr without calls: nodes in order, over numbered values."""

    values: list[Value] = field(default_factory=list[Value])
    inputs: list[int] = field(default_factory=list[int])
    outputs: list[int] = field(default_factory=list[int])
    nodes: list[Node] = field(default_factory=list[Node])


@dataclass
class Classified:
    """A program with the class of each of its values, and of those in the branches of its `cond` nodes."""

    program: Program
    classes: list[Class]
    branches: dict[int, list["Classified"]]

    @property
    def outputs(self) -> list[Class]:
        """The classes of the results."""
        return [self.classes[value] for value in self.program.outputs]


def flatten(closed: Any) -> Program:
    """The program of a `ClosedJaxpr`."""
    program = Program()

    def new(aval: Any, constant: Any = None) -> int:
        program.values.append(Value(aval, constant))
        return len(program.values) - 1

    def walk(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[int]) -> list[int]:
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        for variable, constant in zip(jaxpr.constvars, consts, strict=True):
            known[variable] = new(variable.aval, constant)

        def read(atom: Any) -> int:
            return new(atom.aval, atom.val) if hasattr(atom, "val") else known[atom]

        for equation in jaxpr.eqns:
            inputs = tuple(read(atom) for atom in equation.invars)
            name = equation.primitive.name
            if name in _CALLS:
                body = equation.params[_CALLS[name]]
                consts = getattr(body, "consts", ())
                results = walk(getattr(body, "jaxpr", body), consts, inputs)
                known.update(zip(equation.outvars, results, strict=True))
                continue
            branches = equation.params["branches"] if name == "cond" else ()
            outputs = tuple(new(variable.aval) for variable in equation.outvars)
            known.update(zip(equation.outvars, outputs, strict=True))
            program.nodes.append(Node(equation, inputs, outputs, tuple(map(flatten, branches))))
        return [read(atom) for atom in jaxpr.outvars]

    program.inputs = [new(variable.aval) for variable in closed.jaxpr.invars]
    program.outputs = walk(closed.jaxpr, closed.consts, program.inputs)
    return program


def classify(program: Program, inputs: Sequence[Class], leaf_sizes: Sequence[int]) -> Classified:
    """The class of every value, from those of the inputs."""
    classes = [UNIFORM_CLASS] * len(program.values)
    for index, value in enumerate(program.values):
        if value.constant is not None and value.size > 1:
            bits = _bits(value)
            equal = bits == bits[: len(bits) // value.size] * value.size
            classes[index] = Class(UNIFORM if equal else WHOLE, 0)
    for value, known in zip(program.inputs, inputs, strict=True):
        classes[value] = known
    result = Classified(program, classes, {})

    for position, node in enumerate(program.nodes):
        operands = [classes[value] for value in node.inputs]
        if node.branches:
            index, arguments = operands[0], operands[1:]
            branches = [classify(branch, arguments, leaf_sizes) for branch in node.branches]
            result.branches[position] = branches
            outputs = [_union(one) for one in zip(*(b.outputs for b in branches), strict=True)]
            if index.leaves or index.level:
                outputs = [Class(WHOLE, out.leaves | index.leaves) for out in outputs]
        elif node.name == "optimization_barrier":
            outputs = operands
        else:
            joined = _union(operands)
            keeps = node.name in _ELEMENTWISE or node.name in _SHAPE_ONLY
            outputs = [
                joined if keeps or joined.level == WHOLE else Class(WHOLE, joined.leaves)
                for _ in node.outputs
            ]
        for value, known in zip(node.outputs, outputs, strict=True):
            size = program.values[value].size
            if known.leaves == 0 and size == 1:
                known = UNIFORM_CLASS
            elif known.level == ELEMENTWISE and size != leaf_sizes[known.leaf]:
                known = Class(WHOLE, known.leaves)  # a scalar leaf spread over something larger
            classes[value] = known
    return result


def _union(classes: Sequence[Class]) -> Class:
    result = UNIFORM_CLASS
    for one in classes:
        result |= one
    return result


def evaluate(
    classified: Classified,
    inputs: Sequence[Any],
    wanted: Sequence[int],
    shapes: dict[int, tuple[int, ...]] | None = None,
) -> tuple[list[Any], list[Any]]:
    """Run the part of a program that some of its results need.

    **Arguments:**

    - `inputs`: one per input; None where no wanted result needs it.
    - `wanted`: positions in `program.outputs`.
    - `shapes`: of the pieces of the leaves. Then UNIFORM values are scalars and ELEMENTWISE ones have the
      shape of their leaf's piece, in `inputs` and in what is returned. None: every value has the shape it
      was traced with.

    **Returns:** the wanted results, and scalars that the compiled program must return too so that its
    arithmetic is the whole program's: see `shared_scalars`.
    """
    import jax
    import jax.numpy as jnp

    program, classes = classified.program, classified.classes
    live = needed(program, wanted)
    values: dict[int, Any] = {}
    witnesses: list[Any] = []

    def scalar(index: int) -> bool:
        return shapes is not None and classes[index].level == UNIFORM

    def full(index: int) -> Any:
        shape = program.values[index].aval.shape
        return jnp.broadcast_to(values[index], shape) if scalar(index) else values[index]

    def piece(index: int, shape: tuple[int, ...]) -> Any:
        return jnp.broadcast_to(values[index], shape) if scalar(index) else values[index]

    for index in live:
        value = program.values[index]
        if value.constant is not None:
            constant = value.constant
            if not isinstance(constant, jax.Array):
                constant = jnp.asarray(constant, value.aval.dtype)
            values[index] = constant.reshape(-1)[0] if scalar(index) and value.size else constant
            if scalar(index) and not value.size:
                values[index] = jnp.zeros((), value.aval.dtype)
    for index, given in zip(program.inputs, inputs, strict=True):
        if index in live:
            values[index] = given

    for position, node in enumerate(program.nodes):
        outputs = [index for index in node.outputs if index in live]
        if not outputs:
            continue
        if node.branches:
            *results, witness = _evaluate_cond(classified, position, values, outputs, shapes)
            witnesses.append(witness)
        elif node.name == "optimization_barrier":
            pairs = zip(node.inputs, node.outputs, strict=True)
            results = _bind(node, [values[a] for a, b in pairs if b in live])
        elif (
            shapes is not None
            and classes[outputs[0]].level != WHOLE
            and (node.name in _SHAPE_ONLY or node.name in _ELEMENTWISE)
        ):
            if node.name in _SHAPE_ONLY:
                results = [values[node.inputs[0]]]
            elif scalar(outputs[0]):
                results = _bind(node, [values[index] for index in node.inputs])
            else:
                shape = shapes[classes[outputs[0]].leaf]
                results = _bind(node, [piece(index, shape) for index in node.inputs])
        else:
            results = _bind(node, [full(index) for index in node.inputs])
            results = [r for r, index in zip(results, node.outputs, strict=True) if index in live]
            results = [
                r.reshape(()) if scalar(index) else r
                for r, index in zip(results, outputs, strict=True)
            ]
        values.update(zip(outputs, results, strict=True))
    witnesses += [values[index] for index in shared_scalars(classified) if index in values]
    return [values[program.outputs[position]] for position in wanted], witnesses


def _bind(node: Node, operands: list[Any]) -> list[Any]:
    primitive = node.equation.primitive
    with node.equation.ctx.manager:  # the configuration under which it was traced
        result = primitive.bind(*operands, **primitive.get_bind_params(node.equation.params))
    return list(result) if primitive.multiple_results else [result]


def _evaluate_cond(
    classified: Classified,
    position: int,
    values: dict[int, Any],
    outputs: list[int],
    shapes: dict[int, tuple[int, ...]] | None,
) -> list[Any]:
    import jax

    node = classified.program.nodes[position]
    wanted = [node.outputs.index(output) for output in outputs]
    operands = list(node.inputs[1:])
    given = {i: values[value] for i, value in enumerate(operands) if value in values}

    def runner(branch: Classified) -> Any:
        def run(arguments: dict[int, Any]) -> list[Any]:
            inputs = [arguments.get(i) for i in range(len(operands))]
            results, witnesses = evaluate(branch, inputs, wanted, shapes)
            have = [branch.outputs[i] for i in wanted]
            traced = [branch.program.values[branch.program.outputs[i]].aval for i in wanted]
            want = [classified.classes[output] for output in outputs]
            used = sum((w.astype("float32") for w in witnesses), jax.numpy.zeros((), "float32"))
            return [
                convert(result, a, b, aval.shape, shapes)
                for result, a, b, aval in zip(results, have, want, traced, strict=True)
            ] + [used]

        return run

    branches = [runner(branch) for branch in classified.branches[position]]
    return jax.lax.switch(values[node.inputs[0]], branches, given)


def convert(
    value: Any,
    have: Class,
    want: Class,
    shape: Sequence[int],
    shapes: dict[int, tuple[int, ...]] | None,
) -> Any:
    """A value of class `have`, as one of the wider class `want` is represented."""
    import jax.numpy as jnp

    if shapes is None or have.level != UNIFORM or want.level == UNIFORM:
        return value
    return jnp.broadcast_to(value, shape if want.level == WHOLE else shapes[want.leaf])


def needed(program: Program, wanted: Sequence[int]) -> set[int]:
    """The values on which the wanted results depend."""
    live = {program.outputs[position] for position in wanted}
    for node in reversed(program.nodes):
        outputs = [i for i, output in enumerate(node.outputs) if output in live]
        if not outputs:
            continue
        if node.branches:
            live.add(node.inputs[0])
            for branch in node.branches:
                inside = needed(branch, outputs)
                pairs = zip(node.inputs[1:], branch.inputs, strict=True)
                live.update(operand for operand, inner in pairs if inner in inside)
        elif node.name == "optimization_barrier":
            live.update(node.inputs[i] for i in outputs)
        else:
            live.update(node.inputs)
    return live


def shared_scalars(classified: Classified) -> list[int]:
    """The floating-point scalars that depend on no leaf and are used more than once.

    XLA turns a division by a scalar with one use into a multiplication by its reciprocal, and the last bit
    may change. A scalar that many leaves share must not look like one with a single use where a program
    holds one array only: such a program returns it, which is a use.
    """
    import jax.numpy as jnp

    program = classified.program
    live = needed(program, range(len(program.outputs)))
    origin = list(range(len(program.values)))  # of a value that only has another shape
    uses = [0] * len(program.values)
    for node in program.nodes:
        if not live.isdisjoint(node.outputs):
            if node.name in _SHAPE_ONLY:
                origin[node.outputs[0]] = origin[node.inputs[0]]
            else:
                for index in node.inputs:
                    uses[origin[index]] += 1
    for index in program.outputs:
        uses[origin[index]] += 1
    return [
        index
        for index, value in enumerate(program.values)
        if uses[index] > 1
        and value.size == 1
        and value.constant is None
        and classified.classes[index].level == UNIFORM
        and jnp.issubdtype(value.aval.dtype, jnp.floating)
    ]


def signatures(classified: Classified, inputs: Sequence[str]) -> list[str]:
    """A text for each result that says how it is computed from the named inputs.

    Two results with the same text are the same function of their inputs. The shapes of UNIFORM and
    ELEMENTWISE values do not count, so leaves of several shapes that are treated alike have equal texts. The
    texts are the same on every process: no addresses, no order of sets.
    """
    program, classes = classified.program, classified.classes
    texts: list[str] = [""] * len(program.values)
    for index, value in enumerate(program.values):
        if value.constant is not None:
            texts[index] = _digest(
                "constant", str(value.aval.dtype), _constant(value, classes[index])
            )
    for index, text in zip(program.inputs, inputs, strict=True):
        texts[index] = text
    for position, node in enumerate(program.nodes):
        operands = [texts[index] for index in node.inputs]
        if node.branches:
            branches = [signatures(b, operands[1:]) for b in classified.branches[position]]
            results = [_digest("cond", operands[0], *one) for one in zip(*branches, strict=True)]
        elif node.name == "optimization_barrier":
            results = [_digest(node.name, operand) for operand in operands]
        else:
            narrow = all(classes[index].level != WHOLE for index in node.outputs)
            if narrow and node.name in _SHAPE_ONLY:
                results = operands[:1]
            else:
                shapes = "" if narrow and node.name in _ELEMENTWISE else _shapes(program, node)
                content = (node.name, _canonical(node.equation.params), shapes, *operands)
                results = [_digest(*content, str(i)) for i in range(len(node.outputs))]
        for index, text in zip(node.outputs, results, strict=True):
            texts[index] = text
    return [texts[index] for index in program.outputs]


def _shapes(program: Program, node: Node) -> str:
    avals = [program.values[index].aval for index in (*node.inputs, *node.outputs)]
    return str([(tuple(aval.shape), str(aval.dtype)) for aval in avals])


def _constant(value: Value, known: Class) -> str:
    bits = _bits(value)
    if known.level == UNIFORM:
        return bits[: len(bits) // max(1, value.size)].hex()
    return f"{value.aval.shape}{_digest(bits.hex())}"


def _bits(value: Value) -> bytes:
    """What a constant holds, element after element."""
    import jax
    import numpy as np

    if jax.numpy.issubdtype(value.aval.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value.constant)).tobytes()
    return np.asarray(value.constant, value.aval.dtype).tobytes()


def _canonical(value: Any) -> str:
    """A text for a primitive's parameter, the same on every process. Functions have none."""
    if isinstance(value, dict):
        return str([(key, _canonical(value[key])) for key in sorted(value)])
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return str([_canonical(item) for item in value])
    if hasattr(value, "jaxpr") and hasattr(value, "consts"):
        program = flatten(value)
        classified = classify(program, [Class(WHOLE, 0)] * len(program.inputs), [])
        return str(signatures(classified, [f"input {i}" for i in range(len(program.inputs))]))
    text = f"{type(value).__name__} {value}"
    return type(value).__name__ if " at 0x" in text or "=0x" in text else text


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
