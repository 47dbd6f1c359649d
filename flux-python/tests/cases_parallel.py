"""Cases of transformers' models split over meshes of 1, 2 and 4 ranks; see ``ranks``."""

from __future__ import annotations

import copy
import io
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from transformers import (
    DynamicCache,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import flux_tp
from cases_numpy import raises
from cases_torch import BF16, init_distributed, place
from flux_tp.parallel import _modules
from ranks import HERE

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, GROUPED | {"tie_word_embeddings": False}),
    "mistral": (MistralForCausalLM, MistralConfig, GROUPED | {"num_key_value_heads": 8, "sliding_window": 8, "head_dim": 8}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, GROUPED | {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, GROUPED | {"head_dim": 16}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, SIZES | {"hidden_dropout": 0.0}),
}


def made(name, sizes=None):
    """A model with the same random weights on every rank."""
    kind, config, usual = MODELS[name]
    sizes = sizes or usual
    torch.manual_seed(1)
    model = kind(config(**sizes, attn_implementation="eager")).to(place(), BF16)
    # As trained models have them: no two rows alike, and norms and biases that matter.
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return model


@cache
def meshes():
    """Meshes whose dimension ``tp`` has 1, 2 and 4 ranks."""
    init_distributed()
    world = dist.get_world_size()
    return {tp: init_device_mesh(place().type, (world // tp, tp), mesh_dim_names=("dp", "tp")) for tp in (1, 2, 4)}


def split(name, tp, mode="training", sizes=None, **options):
    return flux_tp.parallelize(made(name, sizes), meshes()[tp]["tp"], mode, verbose=False, max_m=64, **options)


def batch(step, tokens=16):
    """Tokens of two sequences, the same on every rank."""
    return torch.randint(96, (2, tokens), generator=torch.Generator().manual_seed(step)).to(place())


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def steps(model, count):
    """Losses and total norms of gradients of training steps, and the gradients of the first, by name."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = {}
    for step in range(count):
        ids = batch(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if not step:
            found |= {name: whole(parameter.grad).clone() for name, parameter in model.named_parameters()}
        found[f"norm {step}"] = whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    return found


def near(found, one, exact, name):
    """``one`` process is as far from ``exact``, computed in fp32, as bfloat16 explains; ``found`` is no farther than twice that."""
    error, allowed = ((of.float() - exact).norm() for of in (found, one))
    assert error <= 2 * allowed + 2.0**-8 * exact.norm(), f"{name}: {error / exact.norm():.4f}, and {allowed / exact.norm():.4f} of one process"


def gradients_near(model, plain, run):
    """Compares gradients of what ``run`` computes by ``model`` with those of ``plain`` on one process, and of ``plain`` in fp32."""
    exact = copy.deepcopy(plain).float()
    for of in (model, plain, exact):
        of.zero_grad()
        run(of)
    for (name, found), one, other in zip(model.named_parameters(), plain.parameters(), exact.parameters(), strict=True):
        near(whole(found.grad), one.grad, other.grad, name)


def learns_alike(name, count=2, degrees=(2, 4)):
    one, exact = steps(made(name), count), steps(made(name).float(), count)
    for tp in degrees:
        found = steps(split(name, tp), count)
        assert found.keys() == exact.keys()
        for key, value in found.items():
            near(value, one[key], exact[key], f"{name}, {tp} ranks, {key}")


def llama_learns_alike(comm):
    learns_alike("llama", 5, (1, 2, 4))


def mistral_learns_alike(comm):
    learns_alike("mistral")


def qwen2_learns_alike(comm):
    learns_alike("qwen2")


def qwen3_learns_alike(comm):
    learns_alike("qwen3")


def gpt_neox_learns_alike(comm):
    learns_alike("gpt_neox")


def inference_is_alike(comm):
    """Logits of a prefill of any length and of tokens behind it are those of one process."""
    for name, degrees, rows in (("llama", (1, 2, 4), None), ("qwen2", (2,), 64), ("gpt_neox", (4,), None), ("qwen2", (4,), 1), ("qwen3", (2,), 2)):
        for tp in degrees:
            models = split(name, tp, "inference", split_rows=rows), made(name), made(name).float()
            caches = [DynamicCache() for _ in models]
            for ids in (batch(0, 13), batch(1, 1), batch(2, 1)):
                with torch.no_grad():
                    logits = [of.eval()(input_ids=ids, cache=cache, use_cache=True).logits for of, cache in zip(models, caches, strict=True)]
                near(*logits, f"{name}, {tp} ranks")


def inference_adds_residuals_and_normalises_in_its_ops(comm):
    """Of all norms of hidden states the first is computed apart; one that was given others computes its own."""
    ids = batch(0, 5)
    for name, rows in (("llama", 11), ("mistral", 11), ("qwen2", 11), ("llama", 10)):
        model = split(name, 4, "inference", split_rows=rows).eval()
        with torch.no_grad(), mock.patch.object(torch, "rsqrt", wraps=torch.rsqrt) as norms:
            model(input_ids=ids)
            assert norms.call_count == 1, (name, norms.call_count)
            # Of ten tokens the first two of four ranks have three.
            assert norms.call_args.args[0].numel() == (10 if rows > 10 else 3 - (comm.rank > 1)), (rows, norms.call_args)
    norm, other = model.model.norm, torch.randn(1, 5, 64).to(place(), BF16)
    norm.given = torch.zeros_like(other), torch.zeros_like(other)
    with torch.no_grad():
        assert torch.equal(norm(other), made(name).model.norm(other)) and norm.given is None


def rows_are_split_without_gradients_and_hidden_states(comm):
    """What a caller asks for has all tokens, and a model that the cost model has split says so."""
    ids, (one, two) = batch(0, 5), (split("llama", 2, "inference", split_rows=rows).eval() for rows in (1, 64))
    with mock.patch.object(_modules, "matmul_reduce_scatter", wraps=_modules.matmul_reduce_scatter) as split_calls:
        found, expected = (of(input_ids=ids).logits for of in (one, two))
        assert torch.equal(found, expected) and found.requires_grad and not split_calls.called
        with torch.no_grad():
            found, expected = (of(input_ids=ids, output_hidden_states=True) for of in (one, two))
            assert not split_calls.called and len(found.hidden_states) == 3
            assert all(torch.equal(*states) for states in zip(found.hidden_states, expected.hidden_states, strict=True))
            one(input_ids=ids)
            assert split_calls.call_count == 4
    out = io.StringIO()
    sizes = MODELS["llama"][2] | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 1, "vocab_size": 32}
    with redirect_stdout(out):
        model = flux_tp.parallelize(made("llama", sizes), meshes()[2]["tp"], "inference", max_m=2048)
    with torch.no_grad():
        model(input_ids=batch(0, 2) % 32)
    least, _ = model.model.layers[0].splits
    assert 1 < least <= 2048 and (comm.rank or f"from {least} rows on" in out.getvalue()), (least, out.getvalue())
    raises(flux_tp.OperandError, lambda: split("llama", 2, split_rows=1), "split_rows = 1", "'training'")
    raises(flux_tp.OperandError, lambda: split("llama", 2, "inference", split_rows=0), "split_rows = 0")


def inference_in_8_bits(comm):
    """Layers in 8 bits with parameters that are DTensors: scales of a row are those of its whole, and heads may be shared."""
    ids = batch(0, 5)
    sizes = MODELS["qwen2"][2] | {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, "num_key_value_heads": 2, "intermediate_size": 512}
    for form, rows in (("row", 64), ("block", 64), ("row", 1), ("block", 1)):
        models = [split("qwen2", 4, "inference", sizes, split_rows=rows).eval() for _ in range(2)]
        flux_tp.quantize(models[1], form, keep=lambda name, _: name == "lm_head")
        attention = models[1].model.layers[0].self_attn
        assert attention.k_proj.weight.dtype == torch.float8_e4m3fn and models[1].lm_head.weight.dtype == BF16
        assert attention.q_proj.weight_scale.placements == (Shard(1) if form == "row" else Shard(0),)
        with torch.no_grad():
            plain = models[0](input_ids=ids).logits.float()
            with (
                mock.patch.object(_modules, "quantize_rows", wraps=_modules.quantize_rows) as quantised,
                mock.patch.object(_modules, "matmul_reduce_scatter", wraps=_modules.matmul_reduce_scatter) as split_calls,
            ):
                found = models[1](input_ids=ids).logits.float()
            assert split_calls.call_count == (2 * len(models[1].model.layers) if rows == 1 else 0)
            # Inputs of row-parallel layers and of the first; ops before quantise the others.
            assert quantised.call_count == 2 * len(models[1].model.layers) + 1, quantised.call_count
            assert 0 < (found - plain).norm() < 0.2 * plain.norm(), (form, (found - plain).norm() / plain.norm())
        layer, other = (of.model.layers[0].mlp.down_proj for of in models)
        codes, scale = other.weight.to_local().float(), other.weight_scale.to_local()
        wide = codes * (scale.t() if form == "row" else scale.repeat_interleave(128, 0).repeat_interleave(128, 1))
        assert ((wide - layer.weight.to_local().float()).abs() <= wide.abs() / 16 + 2.0**-10).all()
        if form == "row":
            # The scale is of the whole row, whichever rank has its largest element.
            most = codes.abs().amax(1)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            assert (most == 448).all()
    # Some readers of a norm have 16 bits.
    models = [split("qwen2", 4, "inference", sizes, split_rows=rows).eval() for rows in (1, 64)]
    for model in models:
        flux_tp.quantize(model, "row", keep=lambda name, _: name == "lm_head" or name.endswith("k_proj"))
    with torch.no_grad():
        found, expected = (model(input_ids=ids).logits.float() for model in models)
    assert 0 < expected.norm() and (found - expected).norm() < 2.0**-4 * expected.norm(), (found - expected).norm() / expected.norm()
    raises(flux_tp.OperandError, lambda: flux_tp.quantize(split("llama", 4)), "as in training", "keep=")


def inference_has_gradients(comm):
    """As for frozen models with adapters, or on few rows: every rank has all activations."""
    ids = batch(0, 13)
    run = lambda of: F.cross_entropy(of(input_ids=ids).logits.flatten(0, 1).float(), ids.flatten()).backward()
    gradients_near(split("qwen3", 4, "inference"), made("qwen3"), run)


def examples_run(comm):
    """Training with FSDP2, its resumption on other ranks, and generation."""
    meshes()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        said = run_example("train_llama", "--layers", "1", "--steps", "2", "--checkpoint", folder[0])
        said += run_example("train_llama", "--layers", "1", "--steps", "1", "--checkpoint", folder[0], "--tp", "4")
        said += run_example("generate", "--layers", "1", "--batch", "2", "--tokens", "4")
        said += run_example("generate", "--layers", "1", "--batch", "3", "--tokens", "4", "--fp8")
        dist.barrier()
    if dist.get_rank() == 0:
        assert all(f"step {step}: loss" in said for step in range(3)), said
        assert all(f"4 tokens for each of {count} prompts" in said for count in (2, 3)) and "in one AllGather-GEMM" in said, said


def run_example(name, *words):
    """What an example says."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    example = import_module(name)
    sys.path.pop(0)
    said = io.StringIO()
    with mock.patch.object(sys, "argv", [name, *words]), mock.patch.object(dist, "destroy_process_group"), redirect_stdout(said):
        example.main()
    return said.getvalue()


def checkpoints_load_at_other_degrees(comm):
    """A checkpoint of 2 ranks, with its optimizer, loads on 4 and on 1 with the same bits, and training goes on alike."""
    meshes()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        for name in ("llama", "qwen2"):
            checkpoint_loads_at_other_degrees(name, f"{folder[0]}/{name}")
        dist.barrier()


def checkpoint_loads_at_other_degrees(name, folder):
    saved, optimizer = trained(name, 2)
    assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
    weights, moments = get_state_dict(saved, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    loss = step(saved, optimizer)
    for tp in (4, 1):
        loaded, other = trained(name, tp, seed=7)
        weights, moments = get_state_dict(loaded, other)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(loaded, other, model_state_dict=weights, optim_state_dict=moments)
        fresh, of_fresh = trained(name, 2)
        for (key, found), expected in zip(loaded.named_parameters(), fresh.parameters(), strict=True):
            assert torch.equal(whole(found), whole(expected)), key
            for moment, value in of_fresh.state[expected].items():
                assert torch.equal(whole(other.state[found][moment]), whole(value)), (key, moment)
        assert abs(step(loaded, other) - loss) < 2.0**-6 * loss


def trained(name, tp, seed=0):
    """A model behind a step, and its optimizer."""
    model = split(name, tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer, seed)
    return model, optimizer


def step(model, optimizer, seed=0):
    ids = batch(seed)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return whole(loss).item()


def fully_sharded_on_the_other_dimension(comm):
    """FSDP2 over two groups of two ranks, each with tokens of its own: the mean gradients of both, and their norm."""
    mesh = meshes()[2]
    model = split("qwen3", 2)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh["dp"])

    def run(of):
        # FSDP2 has the mean of the groups' gradients.
        parts = [mesh["dp"].get_local_rank()] if of is model else range(2)
        for part in parts:
            ids = batch(part)
            (of(input_ids=ids, labels=ids).loss / len(parts)).backward()

    plain = made("qwen3")
    gradients_near(model, plain, run)
    norms = [whole(nn.utils.clip_grad_norm_(of.parameters(), 1.0)).item() for of in (model, plain)]
    assert abs(norms[0] - norms[1]) < 2.0**-6 * norms[1], norms


def compiled_models(comm):
    """Training and inference in one graph, with the same bits."""
    meshes()
    if comm.rank > 1:
        # Two ranks have a mesh of their own, and tracing takes the others' time.
        return
    sizes = MODELS["qwen3"][2] | {"num_hidden_layers": 1}
    for mode, rows, forms in (("training", None, []), ("inference", 64, [None]), ("inference", 1, [None, "row"])):
        torch._dynamo.reset()
        model, ids = split("qwen3", 2, mode, sizes, split_rows=rows), batch(0)
        compiled = torch.compile(model, fullgraph=True, backend="inductor" if place().type == "cuda" else "aot_eager")
        for form in forms:
            if form:
                flux_tp.quantize(model, form)
                # Tracing takes longer for any number of tokens than for one.
                torch._dynamo.reset()
            # The second is of any number, and the ranks do not divide it.
            for tokens in (16, 7) if rows == 1 and form is None else (16,):
                ids = batch(0, tokens)[:1]
                with torch.no_grad():
                    with mock.patch.object(_modules, "matmul_reduce_scatter", wraps=_modules.matmul_reduce_scatter) as split_calls:
                        expected = model(input_ids=ids).logits
                    assert split_calls.call_count == (0 if rows == 64 else 2)
                    found = compiled(input_ids=ids).logits
                # Whole rows have sums of another order.
                assert torch.equal(found, expected) if tokens != 7 else (found - expected).norm() < 2.0**-6 * expected.norm()
        if forms:
            continue
        found = []
        for of in (model, compiled):
            loss = of(input_ids=ids, labels=ids).loss
            loss.backward()
            found.append([loss, *(parameter.grad.to_local() for parameter in model.parameters())])
            model.zero_grad()
        assert all(map(torch.equal, *found))


def compiled_layers(comm):
    """Each layer compiled by itself, as engines do: one hands its rows on to the next."""
    meshes()
    if comm.rank > 1:
        return
    model = split("llama", 2, "inference", split_rows=1).eval()
    given = {tokens: batch(0, tokens)[:1] for tokens in (16, 12)}
    with torch.no_grad():
        expected = {tokens: model(input_ids=ids).logits for tokens, ids in given.items()}
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="inductor" if place().type == "cuda" else "aot_eager")
        for tokens, ids in given.items():
            assert torch.equal(model(input_ids=ids).logits, expected[tokens])


class Block(nn.Module):
    """What a user writes, batch-first."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64)
        self.last = nn.RMSNorm(64)
        self.head = nn.Linear(64, 96, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(self.last(x))


def styles_stand_beside_those_of_torch(comm):
    """A plan of both, whose rows are split batch-first: with bias of the row-parallel layer, norms and loss_parallel."""
    mesh, ids = meshes()[4]["tp"], batch(3)
    torch.manual_seed(2)
    plain = Block().to(place(), BF16)
    for of_torch in (False, True):
        torch.manual_seed(2)
        model = Block().to(place(), BF16)
        plan = {
            "embedding": (torch_styles if of_torch else flux_tp).RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": flux_tp.SequenceParallel(use_local_output=not of_torch),
            "up": flux_tp.ColwiseParallel(input_layouts=Shard(1), keep_gathered=True),
            "down": flux_tp.RowwiseParallel(output_layouts=Shard(1), partials="float32"),
            "last": flux_tp.SequenceParallel(),
            "head": flux_tp.ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        }
        torch_styles.parallelize_module(model, mesh, plan)

        def run(of):
            with torch_styles.loss_parallel():
                F.cross_entropy(of(ids).flatten(0, 1).float(), ids.flatten()).backward()

        gradients_near(model, plain, run)
        assert not any(placement.is_partial() for parameter in model.parameters() for placement in parameter.grad.placements)


def default_styles_are_those_of_torch(comm):
    """Whole inputs and outputs without arguments, as by torch's styles."""
    mesh, x = meshes()[4]["tp"], torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).to(place(), BF16)
    found = []
    for styles in (flux_tp, torch_styles, None):
        torch.manual_seed(2)
        model = Block().to(place(), BF16)
        if styles is None:
            model.float()
        else:
            torch_styles.parallelize_module(model, mesh, {"up": styles.ColwiseParallel(), "down": styles.RowwiseParallel()})
            assert model.up.weight.placements == (Shard(0),) and model.down.bias.placements == (Replicate(),)
        own = x.clone().to(model.norm.weight.dtype).requires_grad_()
        y = model.down(F.gelu(model.up(own)))
        y.float().square().sum().backward()
        found.append([y, own.grad, *(whole(parameter.grad) for layer in (model.up, model.down) for parameter in layer.parameters())])
    for index, values in enumerate(zip(*found, strict=True)):
        near(*values, index)


def a_replicated_loss_counts_once(comm):
    """A loss that every rank computes of the whole hidden states: gradients are those of one process, not so many times them."""
    ids = batch(0)
    model = flux_tp.parallelize(made("llama").model, meshes()[4]["tp"], verbose=False)
    gradients_near(model, made("llama").model, lambda of: of(input_ids=ids).last_hidden_state.float().square().mean().backward())


def norms_have_gradients_of_all_rows(comm):
    """Without the sum over the ranks they are others: what is forgotten shows."""
    model, ids = split("llama", 4), batch(0)
    gain, found = model.model.layers[0].input_layernorm, []
    for summing in (gain.summing, None):
        gain.summing = summing
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        found.append(gain.weight.grad.to_local().clone())
    assert (found[0] - found[1]).norm() > 0.1 * found[0].norm()


def communicators_of_meshes_are_shared(comm):
    """One of the same ranks serves all modules, unless it has too few rows or is closed."""
    group = lambda tp, **options: flux_tp.parallelize(made("llama"), meshes()[tp]["tp"], verbose=False, **options).lm_head.layout.comm
    first = group(2, max_m=64)
    assert group(2) is first and group(2, max_m=first.max_m) is first
    larger = group(2, max_m=2 * first.max_m)
    assert larger is not first and larger.max_m == 2 * first.max_m and group(2) is larger
    larger.close()
    assert group(2, max_m=64) is first
    first.close()
    assert group(2, max_m=64) not in (first, larger)
    assert group(4) is comm and group(4, transport=comm.transport, timeout=comm.timeout, batch_invariant=False) is comm
    invariant = group(4, batch_invariant=True)
    assert invariant is not comm and invariant.batch_invariant and group(4, batch_invariant=True) is invariant
    assert group(4, batch_invariant=False) is comm, "options reach the layers"
    invariant.close()
    raises(TypeError, lambda: group(4, batch_invarient=True), "batch_invarient")
    raises(flux_tp.OperandError, lambda: group(4, transport="nvlink" if comm.transport == "host" else "host"), "leave the transport out")


def what_cannot_be_split_is_named(comm):
    mesh, refused = meshes()[4]["tp"], lambda call, *words: raises(flux_tp.OperandError, call, *words)
    ids = batch(0, 18)
    refused(lambda: split("llama", 4)(input_ids=ids), "18 tokens", "pad tokens to 20", "-100")
    refused(lambda: split("llama", 4)(input_ids=batch(0), logits_to_keep=1), "logits_to_keep", "inference")
    torch.manual_seed(0)
    odd = LlamaForCausalLM(LlamaConfig(**GROUPED | {"vocab_size": 100})).to(place(), BF16)
    refused(lambda: flux_tp.parallelize(odd, mesh), "embed_tokens", "num_embeddings = 100", "pad it to 128")
    refused(lambda: flux_tp.parallelize(made("llama"), meshes()[4]), "2 dimensions", "mesh['tp']")
    refused(lambda: flux_tp.parallelize(made("llama").float(), mesh), "torch.float32", "torch.bfloat16")
    refused(lambda: flux_tp.parallelize(Block(), mesh), "Block", "parallelize_module")
    gated = flux_tp.ColumnParallelLinear(64, 128, activation="swiglu")
    refused(lambda: torch_styles.parallelize_module(nn.Sequential(gated), mesh, {"0": flux_tp.ColwiseParallel()}), "torch.nn.Linear")
    model = made("llama")
    model.model.layers[1].extra = nn.Linear(64, 64)
    refused(lambda: flux_tp.parallelize(model, mesh), "model.layers.1.extra.weight", "SequenceParallel", "mode='inference'")
    with warnings.catch_warnings(record=True) as said:
        flux_tp.parallelize(model, mesh, "inference", verbose=False)
    assert "model.layers.1.extra.weight" in str(said[0].message)
    model = split("llama", 4)
    model.model.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states.float(), None)
    refused(lambda: model(input_ids=batch(0)), ".float", "flux_tp.Fused")
