# SPDX-License-Identifier: Apache-2.0
"""cumla inside ``torch.compile`` and ``torch.export``: its functions as operations of PyTorch.

``import cumla.torch`` registers ``torch.ops.cumla.<function>``. What is compiled or exported and
calls ``cumla.<function>`` has the operation in its graph from then on, and so has what ``make_fx``
traces; eager calls stay as they are. Schemas come from the specs of the functions, and an
operation calls its function.

Operations have the arguments of the functions, but for these:

* Arrays that may come in parts, or as a sequence, are lists of tensors: ``[q]``,
  ``[q_nope, q_pe]``.
* ``mask`` and ``bias`` of ``attention`` are their arrays, ``mask_start``, ``bias_slopes`` and so
  on.
* ``kv_scale``, ``k_scale`` and ``v_scale`` are tensors; a number is ``kv_scale_number`` and so on.
* ``mla_decode`` returns out and lse. ``mla_decode_out`` takes both and returns nothing, its
  overload ``mla_decode_out.out`` takes out and returns lse. A result that is None is an empty
  tensor.
* Queries that an append rotates in place are passed twice: as ``q_pe`` and ``q_pe_out``, or as
  ``q`` and ``q_out``.
* There is no ``stream``: work runs on the current one of PyTorch.

``<function>_schedule`` and ``<function>_attend`` are the halves of a function that has a plan. Both
take the arguments of the function, and `workspace`. The first writes the schedule there; of the
arrays it reads the lengths, and of the others only shapes and dtypes. The second attends by it, in
as many layers of these shapes as there are. `workspace` is that of a plan: uint8,
``workspace_bytes`` of the plan's class long. A plan that was updated in it for the same shapes
serves as well. The CPU knows no schedules, and the workspace may be empty there. To attend by a
workspace without a schedule for these shapes is undefined.

No gradients flow: a tensor that requires them is refused while autograd records, RuntimeError, as
it is by eager calls.
All other errors are those of the functions.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from cumla.errors import MissingDependencyError

try:
    import torch
except ImportError as error:
    problem = f"torch: cumla.torch needs PyTorch ({error})"
    raise MissingDependencyError(problem, "pip install torch, or cumla[torch]") from error

from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import _register_namedtuple

import cumla
from cumla.core._dlpack import ArrayView
from cumla.core.arguments import (
    check_dtype,
    check_output,
    check_workspace,
    checked_flag,
    number_of,
)
from cumla.core.arrays import WORKSPACE, open_call, to_numpy
from cumla.core.check_mode import check_factors, check_mode, copy_to_host, may_look
from cumla.core.frameworks import (
    NO_DSA_PLAN,
    NO_PLANS,
    Framework,
    Traced,
    framework_of_type,
    torch_framework,
)
from cumla.core.names import arg
from cumla.core.operation import (
    Ready,
    Scheduled,
    checked_outputs,
    pack,
    run_on_cpu,
    trusted_of,
)
from cumla.core.spec import (
    REQUIRED,
    SPECS,
    Argument,
    Cache,
    Factor,
    Input,
    Instead,
    Option,
    Record,
    Spec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cumla.core.arguments import Views
    from cumla.core.arrays import Call
    from cumla.core.operation import Operation

    Arguments = Mapping[str, Any]
    Take = Callable[..., tuple[Any, ...]]

__all__: list[str] = []


for _name in cumla.__all__:  # loads all modules that have specs
    getattr(cumla, _name)


# --- schemas -------------------------------------------------------------------------------------


def _schema(spec: Spec, more: tuple[str, ...], missing: tuple[str, ...]) -> str:
    """Write arguments and results: all but outputs, what is written to `more`, what is returned."""
    texts: list[str] = []
    for i, argument in enumerate(spec.arguments):
        if i == spec.positional:
            texts.append("*")
        texts += _texts(argument, len(texts))
    texts += [f"Tensor(out{place}!) {name}" for place, name in enumerate(more)]
    return f"({', '.join(texts)}) -> ({', '.join(['Tensor'] * len(missing))})"


def _texts(argument: Argument, place: int) -> list[str]:
    """Write an argument as a schema has it."""
    name, has_default = argument.name, argument.default is not REQUIRED
    if isinstance(argument, Factor):
        return [f"Tensor? {name}=None", f"float? {name}_number=None"]
    if isinstance(argument, Option):
        default = f"={argument.default!r}".replace("'", '"') if has_default else ""
        return [f"{argument.kind} {name}{default}"]
    if isinstance(argument, Instead):
        return [f"Tensor(a{place}!)? {name}=None"]
    if isinstance(argument, Record):
        return [f"Tensor? {name}_{field}=None" for field in argument.fields]
    if not isinstance(argument, Input):
        return []
    kind = f"Tensor(a{place}!)" if isinstance(argument, Cache) else "Tensor"
    kind += "[]" if argument.is_list else ""
    kind += "?" if has_default or argument.is_nullable else ""
    return [f"{kind} {name}{'=None' if has_default else ''}"]


# --- operations ----------------------------------------------------------------------------------


class _StandIn:
    """Stands for a tensor in a call of a function whose operation `take` runs."""

    def __init__(self, tensor: Any, take: Take) -> None:
        self.tensor = tensor
        self.take = take


def _positional(spec: Spec) -> tuple[str, ...]:
    return tuple([argument.name for argument in spec.arguments[: spec.positional]])


def _call(
    spec: Spec, missing: tuple[str, ...], take: Take | None, *args: Any, **kwargs: Any
) -> Any:
    """Run an operation of PyTorch: call the function, on stand-ins if `take` is to run it.

    `missing` are the outputs that the caller did not give, which are returned.
    """
    given = dict(zip(_positional(spec), args, strict=False)) | kwargs
    _refuse_gradients(given)
    if take is not None:
        take = partial(take, given.pop(WORKSPACE, None))
    assert spec.function is not None
    results = spec.function(**_arguments(spec, given, take))
    if not missing:
        return None
    results = results if isinstance(results, tuple) else (results,)
    named = dict(zip(spec.returns, results, strict=True))
    new = [args[0].new_empty(0) if named[key] is None else named[key] for key in missing]
    return new[0] if len(new) == 1 else tuple(new)


def _arguments(spec: Spec, given: Arguments, take: Take | None) -> dict[str, Any]:
    """Turn arguments of an operation of PyTorch into those of the function."""
    arguments: dict[str, Any] = {}
    lists = {array.name: array for array in spec.arrays if array.is_list}
    fields = {f"{a.name}_{field}": (a, field) for a in spec.rows(Record) for field in a.fields}
    records: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        if isinstance(value, torch.Tensor):
            value = value if take is None else _StandIn(value, take)
        elif key in lists and value is not None:
            value = value if take is None else [_StandIn(part, take) for part in value]
            if len(value) == 1 and not lists[key].is_stack:
                (value,) = value
        if key in fields:
            if value is not None:
                record, field = fields[key]
                records.setdefault(record.name, {})[field] = value
            continue
        factor = key.removesuffix("_number")
        if factor != key and arguments.get(factor) is not None:
            if value is not None:
                raise ValueError(f"{key}: needs no {factor} beside it, got both; pass one of them")
            continue
        arguments[factor] = value
    for record in spec.rows(Record):
        if record.name in records:
            arguments[record.name] = record.kind(**records[record.name])
    for instead in spec.rows(Instead):
        if arguments.get(instead.of) is not None and arguments.get(instead.name) is None:
            raise ValueError(
                f"{instead.name}: needed beside {instead.of}, got None; pass {instead.of} as "
                f"{instead.name} as well to rotate it in place"
            )
    return arguments


def _refuse_gradients(given: Arguments) -> None:
    """Refuse tensors that autograd would have to look through, those in lists as well."""
    named = []
    for name, value in given.items():
        parts = value if isinstance(value, (list, tuple)) else (value,)
        named += [(name, part) for part in parts if isinstance(part, torch.Tensor)]
    torch_framework().refuse_gradients(named)


def _view(tensor: Any) -> ArrayView:
    """See a tensor without its memory."""
    strides = tuple([stride * tensor.dtype.itemsize for stride in tensor.stride()])
    device = tensor.device.index if tensor.device.type == "cuda" else None
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ArrayView(0, tuple(tensor.shape), strides, dtype, device)


def _evaluate(
    workspace: Any,
    operation: Operation[Any, Any],
    inputs: Arguments,
    outputs: Arguments,
    options: Any,
) -> tuple[Any, ...]:
    """Check all but memory, and make results without values; None for outputs that were given."""
    given = {name: array for name, array in {**inputs, **outputs}.items() if array is not None}
    views = dict.fromkeys(outputs) | {name: _view(array.tensor) for name, array in given.items()}
    if workspace is not None:
        check_workspace(_view(workspace), 0)
    first = next(iter(inputs.values())).tensor
    results = []
    for output in operation.outputs(operation.arguments(views, options)):
        view = views[output.name]
        if view is None:
            dtype = getattr(torch, output.dtypes[0])
            if output.swapped and first.device.type == "cuda":
                *batch, tokens, heads = output.shape
                result = first.new_empty((*batch, heads, tokens), dtype=dtype).mT
            else:
                result = first.new_empty(output.shape, dtype=dtype)
            results.append(result)
        else:
            check_output(output.name, view, output.shape, output.dtypes, output.lies)
            results.append(None)
    return tuple(results)


_WITHOUT_MEMORY = (_StandIn, FakeTensor, FunctionalTensor)
_ready = Ready()  # launches of halves, by what they were called with


def _run_half(
    attends: bool,
    workspace: Any,
    operation: Operation[Any, Any],
    inputs: Arguments,
    outputs: Arguments,
    options: Any,
) -> tuple[Any, ...]:
    """Run the schedule of an operation, or attention, in the caller's workspace."""
    assert isinstance(operation, Scheduled)
    arrays = {name: array.tensor for name, array in inputs.items()}
    outs = {name: array and array.tensor for name, array in outputs.items()}
    written = (*outs.items(), (WORKSPACE, workspace))
    call = open_call(tuple(arrays.items()), written)
    with call:
        looks = check_mode() and may_look(call)
        identity = (operation, attends, call.views, *arrays, options)
        packed = None if looks else _ready.get(identity)
        if packed is None:
            views = dict(zip((*arrays, *outs, WORKSPACE), call.views, strict=True))
            arguments = operation.arguments(views, options)
            returned = operation.outputs(arguments) if attends else ()
            given = checked_outputs(operation, returned, views, (*outs, WORKSPACE))
            if looks:
                _look(attends, operation, call, arrays, views, arguments)
            buffer = views[WORKSPACE]
            assert buffer is not None
            if call.device is None:
                check_dtype(WORKSPACE, buffer.dtype, ("uint8",))
                results = run_on_cpu(operation, call, arguments, arrays, outs) if attends else ()
                return results or (None,) * len(outs)
            key = operation.key(arguments, call.device)
            check_workspace(buffer, operation.workspace_bytes(key))
            half = operation.attend if attends else operation.schedule
            packed = pack(call, half, key, arguments[attends], returned, given, buffer.ptr)
            _ready.keep(identity, packed)
        return packed.run(call, [array for _, array in written]) or (None,) * len(outs)


def _look(
    attends: bool,
    operation: Scheduled[Any, Any],
    call: Call,
    arrays: Arguments,
    views: Views,
    arguments: Any,
) -> None:
    """Check mode: raise for the first value out of range that a half reads."""
    half = operation if attends else operation.schedule
    read = trusted_of(operation, views) if attends else {n: views.get(n) for n in half.trusted}
    host = {
        name: to_numpy(name, arrays[name])
        if call.device is None
        else copy_to_host(view, call.stream)
        for name, view in read.items()
        if view is not None
    }
    check_factors(host, operation.factor_axes)
    for name in operation.trusted:  # a schedule reads no page numbers: any will do
        view = views.get(name)
        if name not in host and view is not None:
            host[name] = np.zeros(view.shape, view.dtype)
    operation.check_values(host, arguments)


# --- calls that are traced -----------------------------------------------------------------------


def _substitute(spec: Spec) -> Callable[..., Any]:
    """Make what a graph has in place of a call of a function: that of an operation of PyTorch."""
    # Strings and tuples alone, because TorchDynamo traces these.
    name, returns, result_of = spec.name, spec.returns, spec.result
    forms = {argument.name: _form(argument) for argument in spec.arguments}
    positional, known = _positional(spec), (*forms, "stream")
    outputs_given = tuple([output.name for output in spec.outputs])
    flags = tuple([option.name for option in spec.options if option.kind == "bool"])
    insteads = tuple([(instead.name, instead.of) for instead in spec.rows(Instead)])
    records = tuple([(record.name, record.fields) for record in spec.rows(Record)])
    needs = {output.name: output.of for output in spec.outputs if output.of}
    only_given = tuple([output.name for output in spec.outputs if output.only_given])
    asked = tuple([option.name for option in spec.options if option.asks])
    operations = {}
    for some in _subsets(outputs_given):
        packet = getattr(torch.ops.cumla, f"{name}_out" if some else name)
        overload = "default" if some in ((), outputs_given) else "_".join(some)
        operations[some] = getattr(packet, overload)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(positional, args, strict=False))
        if len(args) > len(positional):
            raise TypeError(f"{name}: needs at most {len(positional)} positional arguments")
        for key in kwargs:
            if key not in known or key in given:
                raise TypeError(f"{name}: got an argument {key} that is unknown or came before")
        given.update(kwargs)
        for key in flags:  # for which a schema takes any number
            if key in given:
                given[key] = checked_flag(key, given[key])
        if given.pop("stream", None) is not None:
            raise ValueError(
                "stream: needs None in a graph, got a stream; leave it out, and make it PyTorch's "
                "current one where the graph runs"
            )
        outputs = {key: given.pop(key, None) for key in outputs_given}
        which = tuple([key for key, array in outputs.items() if array is not None])
        for key, fields in records:
            record = given.pop(key, None)
            if record is not None:
                for field in fields:
                    given[f"{key}_{field}"] = getattr(record, field)
        arguments = dict([_argument(forms.get(key, ""), key, v) for key, v in given.items()])
        for key, of in insteads:
            if arguments.get(key) is None:
                arguments[key] = arguments.get(of)
        new = operations[which](**arguments, **{key: outputs[key] for key in which})
        if not returns:
            return None
        rest = iter(new if isinstance(new, tuple) else [new])
        results = []
        for key in returns:
            result = outputs[key] if key in which else next(rest)
            is_left_out = key in needs and given[needs[key]] is None
            is_left_out |= key in only_given and key not in which
            is_left_out |= key in asked and not given.get(key)
            results.append(None if is_left_out else result)
        return results[0] if result_of is None else result_of(*results)

    return call


def _form(argument: Argument) -> str:
    """Return how an argument differs in the operation of PyTorch."""
    if isinstance(argument, Factor):
        return "factor"
    if isinstance(argument, Option):
        return argument.kind
    if not (isinstance(argument, Input) and argument.is_list):
        return ""
    return "stack" if argument.is_stack else "list"


def _argument(form: str, key: str, value: Any) -> tuple[str, Any]:
    """Turn an argument of a function into one of its operation of PyTorch."""
    if value is None:
        return key, value
    if form in ("list", "stack"):
        if isinstance(value, (list, tuple)):
            return key, list(value)
        return key, list(value.unbind()) if form == "stack" else [value]
    if form == "factor":
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return f"{key}_number", float(value)
        number_of(key, value)  # which refuses what is no array
    if form == "str?":  # a dtype
        return key, str(value).removeprefix("torch.")
    if form == "int[]?":
        pair = value if isinstance(value, (list, tuple)) else (value, None)
        return key, [-1 if side is None else side for side in pair]
    return key, value


class _WithoutMemory(Framework):
    """Stand-ins, and tensors that are traced without TorchDynamo, as by torch.export."""

    name = "torch"

    def views(self, named: tuple[tuple[str, Any], ...]) -> list[ArrayView | None]:
        raise _traced(*named[0])


def _traced(name: str, tensor: Any) -> TypeError:
    if type(tensor) not in _WITHOUT_MEMORY:
        return torch_framework().traced(name)
    kind = type(tensor).__name__
    text = f"{arg(name)}: needs a tensor with memory, got a {kind}; {NO_PLANS}{NO_DSA_PLAN}"
    return Traced(text, __name__)


def run(
    operation: Operation[Any, Any], inputs: Arguments, outputs: Arguments, options: Any, stream: Any
) -> tuple[Any, ...]:
    """Run an operation on stand-ins, or put that of PyTorch into the graph that is being traced.

    The second is called in place of the function whose operation this is.
    """
    first, array = next(iter(inputs.items()))
    if isinstance(array, _StandIn):
        return array.take(operation, inputs, outputs, options)
    for name, array in {**inputs, **outputs}.items():
        if array is not None and not isinstance(array, torch.Tensor):
            kind = type(array)
            raise TypeError(
                f"{name}: needs a tensor of PyTorch beside those that are traced, got "
                f"{kind.__module__}.{kind.__qualname__}; convert it"
            )
    spec = operation.spec
    given = None if spec is None else spec.given(inputs, outputs, options)
    if spec is None or given is None:
        raise _traced(first, array)
    results = _SUBSTITUTES[spec.name](**given)
    if not isinstance(results, tuple):
        return (results,)
    named = dict(zip(spec.returns, results, strict=True))
    return tuple([named[key] for key in outputs])  # in the operation's order


# --- registration --------------------------------------------------------------------------------


def _subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [some for count in range(len(names) + 1) for some in combinations(names, count)]


def _define(spec: Spec) -> None:
    outputs = tuple([output.name for output in spec.outputs])
    for given in _subsets(outputs):
        missing = tuple([key for key in spec.returns if key not in given])
        _register(spec, "", given, missing, None)
        if spec.planned:
            _register(spec, "_attend", given, missing, partial(_run_half, True))
    if spec.planned:
        _register(spec, "_schedule", (), (), partial(_run_half, False))


def _register(
    spec: Spec, half: str, given: tuple[str, ...], missing: tuple[str, ...], take: Take | None
) -> None:
    """Register one operation of PyTorch: of all of a function, or of a half."""
    is_whole = len(given) in (0, len(spec.outputs))
    overload = "" if is_whole else f".{'_'.join(given)}"
    operation = f"{spec.name}{half}{'_out' if given else ''}{overload}"
    more = (*given, WORKSPACE) if half else given
    _LIBRARY.define(operation + _schema(spec, more, missing), tags=_TAGS)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(operation, partial(_call, spec, missing, take), key)
    fake = partial(_call, spec, missing, _evaluate)
    torch.library.register_fake(f"cumla::{operation}", fake, lib=_LIBRARY)


_LIBRARY = torch.library.Library("cumla", "FRAGMENT")
_TAGS = tuple(  # those that this PyTorch has
    getattr(torch.Tag, tag)
    for tag in ("needs_exact_strides", "pt2_compliant_tag")
    if hasattr(torch.Tag, tag)
)
_SUBSTITUTES = {}
for _spec in SPECS.values():
    _define(_spec)
    _SUBSTITUTES[_spec.name] = _substitute(_spec)
    torch.compiler.substitute_in_graph(_spec.function)(_SUBSTITUTES[_spec.name])
for _kind in (
    cumla.AttentionState,
    cumla.PrefixGroups,
    cumla.QuantizedRows,
    cumla.TopKResult,
):  # so that exported programs can be saved
    _register_namedtuple(_kind, serialized_type_name=f"cumla.{_kind.__name__}")
for _record in (cumla.AttentionMask, cumla.AttentionBias):
    torch.export.register_dataclass(  # so that traced and exported programs take them
        _record, serialized_type_name=f"cumla.{_record.__name__}"
    )
framework_of_type |= dict.fromkeys(_WITHOUT_MEMORY, _WithoutMemory())
