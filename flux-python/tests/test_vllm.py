"""vLLM's layers computed by flux_tp: on the host transport beneath stand-ins of vLLM's classes."""

import pytest

from ranks import Ranks

pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, "cases_vllm cases_vllm_fp8 cases_vllm_norms cases_vllm_sp", forked=True, max_m=40) as ranks:
        yield ranks


CASES = ["a_layer_is_one_op", "other_layers_stay", "more_rows_stay", "a_compiled_layer_is_one_op"]
CASES += ["an_fp8_layer_is_one_op", "weights_are_not_copied", "other_fp8_layers_stay", "a_compiled_fp8_layer_is_one_op"]
CASES += ["norms_are_in_the_op", "what_follows_otherwise_stays", "graphs_of_more_rows_stay"]
CASES += ["split_rows_are_fused", "fewer_rows_stay_whole", "what_is_split_otherwise_stays"]


@pytest.mark.parametrize("case", CASES)
def test_ranks(ranks, case):
    ranks.run(case)


def test_nothing_happens_unasked(monkeypatch):
    import flux_tp
    from flux_tp.integrations import vllm

    # It would import vLLM.
    for value in ("", "0"):
        monkeypatch.setenv("FLUX_VLLM", value)
        vllm.register()
    monkeypatch.delenv("FLUX_VLLM")
    vllm.register()
    monkeypatch.setenv("FLUX_VLLM", "yes")
    with pytest.raises(flux_tp.FluxError, match="FLUX_VLLM = 'yes': give 1"):
        vllm.register()


def test_the_wheel_names_the_plugin():
    from importlib.metadata import entry_points

    (plugin,) = (found for found in entry_points(group="vllm.general_plugins") if found.name == "flux_tp")
    from flux_tp.integrations.vllm import register

    assert plugin.load() is register


def test_rows_of_graphs():
    from cases_vllm import configured
    from flux_tp.integrations._vllm_config import captured

    assert captured(configured(sizes=[4, 1, 2], max_m=64)) == [1, 2, 4]
    assert captured(configured(sizes=None, max_m=64)) == []
    # Three drafted tokens and one more: vLLM rounds sizes to fours.
    assert captured(configured(sizes=[1, 2, 6, 64], max_m=64, drafted=3)) == [1, 2, 4, 6, 8, 64]
    assert captured(configured(sizes=[1, 63], max_m=63, drafted=1)) == [1, 2, 63]


def test_graphs_that_have_norms_in_the_op():
    from cases_vllm import configured
    from flux_tp.integrations._vllm_config import normed

    config = configured(sizes=[1, 2, 16], max_m=64)
    for _ in range(2):
        assert normed(config, False) == 1e-5
        # vLLM compiles the rows of CUDA graphs for themselves.
        assert config.compilation_config.compile_ranges_endpoints == [64, 16]
    for settings in ({"mode": 0}, {"eps": None}, {"sizes": None}):
        config = configured(max_m=64, **settings)
        assert normed(config, False) is None and config.compilation_config.compile_ranges_endpoints == [64], settings
    assert normed(configured(sizes=[64], max_m=64), False) == 1e-5
    # Roundings differ in graphs with the norm in the op and without it.
    assert normed(configured(max_m=64), True) is None
    # One graph has split rows of all numbers.
    config = configured(max_m=64, enable_sp=True)
    assert normed(config, False) == 1e-5 and config.compilation_config.compile_ranges_endpoints == [64]


def test_rows_that_are_split():
    from cases_vllm import configured
    from flux_tp.integrations._vllm_config import captured, least_split

    for least, expected in ((None, 1), (8, 8), (1024, 64)):
        assert least_split(configured(max_m=64, enable_sp=True, least=least)) == expected
    # Graphs have a multiple of the ranks' rows, and with one drafted token of two.
    assert captured(configured(sizes=[1, 3, 8], max_m=64, drafted=1, enable_sp=True)) == [1, 2, 3, 4, 8]


def as_vllm(monkeypatch, given):
    """Has modules of vLLM, by their names behind ``vllm``, hold what is given."""
    import sys
    from types import ModuleType

    for name, of in given.items():
        module = ModuleType(f"vllm{name}")
        vars(module).update(of)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_vllm_makes_its_layers_with_those_of_flux(monkeypatch):
    from types import ModuleType, SimpleNamespace

    from flux_tp.integrations import vllm

    registry, taken = {}, []
    row = type("RowParallelLinear", (), {"register_oot": classmethod(lambda cls, of: registry.__setitem__(cls.__name__, of))})
    column = type("ColumnParallelLinear", (), {"__init__": lambda self, n: setattr(self, "n", n)})
    merged, qkv = (type(name, (column,), {}) for name in ("MergedColumnParallelLinear", "QKVParallelLinear"))
    other = type("Other", (merged,), {})
    theirs = {kind.__name__: kind for kind in (row, column, merged, qkv)}
    monkeypatch.setattr(vllm.ColumnParallel, "_is_taken", lambda self: taken.append(self.n) or self.n > 1)
    sequence = ModuleType("vllm.compilation.passes.fusion.sequence_parallelism")
    sequence.get_sequence_parallelism_threshold = lambda hidden, tp, bytes: 1024
    given = {
        "": {"envs": SimpleNamespace(environment_variables={})},
        ".model_executor.custom_op": {"op_registry_oot": registry},
        ".model_executor.layers": {"linear": SimpleNamespace(**theirs)},
        ".platforms": {"current_platform": SimpleNamespace(is_cuda=lambda: True)},
        ".compilation.passes.fusion": {"sequence_parallelism": sequence},
    }
    as_vllm(monkeypatch, given)
    monkeypatch.setenv("FLUX_VLLM", "1")
    for _ in range(2):
        vllm.register()
        assert issubclass(registry["RowParallelLinear"], (vllm.RowParallel, row))
        taken.clear()
        # A layer that is not taken has its very class.
        for kind in (column, merged, qkv):
            assert type(kind(1)) is kind
            layer = kind(2)
            assert isinstance(layer, vllm.ColumnParallel) and isinstance(layer, kind) and type(layer).__name__ == f"Flux{kind.__name__}"
        assert type(other(3)) is other and taken == [1, 2] * 3
        # vLLM asks for the least rows where the user gives none.
        assert sequence.get_sequence_parallelism_threshold(8192, 2, 2) == 1


def test_another_plugins_row_parallel_layer_stays(monkeypatch, caplog):
    from types import SimpleNamespace

    from flux_tp.integrations import vllm

    other, column = type("Another", (), {}), type("ColumnParallelLinear", (), {})
    layers = SimpleNamespace(RowParallelLinear=type("RowParallelLinear", (), {}), ColumnParallelLinear=column)
    given = {
        "": {"envs": SimpleNamespace(environment_variables={})},
        ".model_executor.custom_op": {"op_registry_oot": {"RowParallelLinear": other}},
        ".model_executor.layers": {"linear": layers},
        ".platforms": {"current_platform": SimpleNamespace(is_cuda=lambda: False)},
    }
    as_vllm(monkeypatch, given)
    monkeypatch.setenv("FLUX_VLLM", "1")
    vllm.register()
    assert "Another has the place" in caplog.text and not hasattr(column.__init__, "flux_takes")


def test_a_layer_that_stays_is_named_once(caplog):
    from types import SimpleNamespace

    from flux_tp.integrations import _vllm_layers

    for prefix in ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"):
        _vllm_layers._warn(SimpleNamespace(prefix=prefix), "a reason of this test")
    assert caplog.text.count("a reason of this test") == 1 and "model.layers.0.mlp.down_proj, and layers like it" in caplog.text


def test_settings_that_keep_vllms_layers():
    from cases_vllm import configured
    from flux_tp.integrations._vllm_config import unfit

    assert unfit(configured()) is None and unfit(configured(enable_sp=True)) is None and unfit(configured(lora=object())) is None
    refused = [({"enable_sp": True, "mode": 0}, "enable_sp"), ({"enable_sp": True, "lora": object()}, "LoRA"), ({"ubatching": True}, "micro-batches"), ({"offloaded": 1.0}, "host memory")]
    for settings, word in refused:
        assert word in unfit(configured(**settings))


def test_where_8_bit_layers_are_fused(monkeypatch):
    import sys
    from types import ModuleType, SimpleNamespace

    import torch
    from flux_tp.integrations._vllm_fp8 import computes

    module = ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", module)
    # Without batch invariance, and with it: of tensors, rows and blocks.
    for capability, fused in (((9, 0), ["111", "001"]), ((8, 9), ["000", "000"]), ((10, 0), ["000", "000"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        for invariant, expected in enumerate(fused):
            module.envs = SimpleNamespace(VLLM_BATCH_INVARIANT=bool(invariant))
            assert "".join(str(int(computes(form))) for form in ("tensor", "row", "block")) == expected
            assert computes("none")


def test_the_pass_is_ahead_of_vllms_own(monkeypatch):
    from types import SimpleNamespace

    import torch
    from cases_vllm import configured
    from flux_tp.integrations import _vllm_passes
    from flux_tp.integrations._vllm_norms import Epilogue, NormFusion
    from flux_tp.integrations._vllm_sp import SplitRows

    class NoOpEliminationPass:
        pass

    class SequenceParallelismPass:
        pass

    class PostGradPassManager:
        def configure(self, config):
            split = [SequenceParallelismPass()] if config.compilation_config.pass_config.enable_sp else []
            self.passes = [NoOpEliminationPass(), *split, "theirs"]

    def forward_static(x, eps, hidden, dtype, weight, residual):
        wide = x.float() + residual
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(dtype) * weight, wide.to(dtype)

    given = {
        "compilation.passes.fusion.sequence_parallelism": {"SequenceParallelismPass": SequenceParallelismPass},
        "compilation.passes.inductor_pass": {"InductorPass": type("InductorPass", (), {})},
        "compilation.passes.pass_manager": {"PostGradPassManager": PostGradPassManager},
        "compilation.passes.utility.noop_elimination": {"NoOpEliminationPass": NoOpEliminationPass},
        "model_executor.layers.layernorm": {"RMSNorm": SimpleNamespace(forward_static=forward_static)},
    }
    as_vllm(monkeypatch, {f".{name}": of for name, of in given.items()})
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon) -> ()")
    monkeypatch.setattr(_vllm_passes, "built", set())
    _vllm_passes.add_passes()
    _vllm_passes.add_passes()
    config, manager = configured(sizes=[1, 8]), PostGradPassManager()
    manager.configure(config)
    assert manager.passes[1:] == ["theirs"]
    split = configured(sizes=[2, 8], enable_sp=True)
    manager.configure(split)
    _, ahead, fusion, theirs = manager.passes
    assert isinstance(ahead, SequenceParallelismPass) and isinstance(fusion, SplitRows) and theirs == "theirs"
    assert fusion.norms.is_applicable_for_range(SimpleNamespace(start=1, end=split.scheduler_config.max_num_batched_tokens))
    _vllm_passes.built.add(Epilogue(0, "matmul_all_reduce", 64, 128, torch.bfloat16, 0, False, 1e-5))
    manager.configure(config)
    _, fusion, theirs = manager.passes
    assert isinstance(fusion, NormFusion) and fusion.most == 8 and theirs == "theirs"


def test_a_step_raises_what_a_communicator_found(monkeypatch):
    from flux_tp.integrations import _vllm_groups

    class Broken:
        def check(self):
            raise RuntimeError("a peer is lost")

    class Later:
        def get_output(self):
            return 7

    class Worker:
        def execute_model(self, output):
            return output

    step = _vllm_groups.checked(Worker.execute_model)
    assert step(Worker(), 5) == 5 and step(Worker(), Later()).get_output() == 7
    monkeypatch.setitem(_vllm_groups._communicators, "tp:0", Broken())
    later = step(Worker(), Later())
    for asked in (lambda: step(Worker(), 5), later.get_output):
        with pytest.raises(RuntimeError, match="a peer is lost"):
            asked()
