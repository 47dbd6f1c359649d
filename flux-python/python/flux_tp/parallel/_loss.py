"""The loss of a language model whose vocabulary is split over the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .._rows import all_reduce
from ..errors import OperandError
from ._mesh import arrange

__all__ = ["causal_lm_loss"]


class _CrossEntropy(torch.autograd.Function):
    """``-log softmax(logits)[target]`` of each row, of logits whose columns are split; a target below 0 has the loss 0."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mesh: DeviceMesh) -> Tensor:
        group = mesh.get_group()
        logits, columns = logits.float(), logits.shape[1]
        logits = logits - all_reduce(logits.amax(1), "max", group).unsqueeze(1)
        own = targets - mesh.get_local_rank() * columns
        others = (own < 0) | (own >= columns)
        own = own.masked_fill(others, 0).unsqueeze(1)
        of_target = logits.gather(1, own).squeeze(1).masked_fill(others, 0)
        exponentials = logits.exp()
        sums, of_target = all_reduce(torch.stack([exponentials.sum(1), of_target]), "sum", group)
        ctx.save_for_backward(exponentials.div_(sums.unsqueeze(1)), own, others, targets)
        return (sums.log() - of_target).masked_fill(targets < 0, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        softmax, own, others, targets = ctx.saved_tensors
        dlogits = softmax.scatter_add(1, own, others.unsqueeze(1).float() - 1)
        return dlogits * dloss.masked_fill(targets < 0, 0).unsqueeze(1), None, None


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    mesh: DeviceMesh | None = None,
    **_: Any,
) -> Tensor:
    """The mean cross-entropy of the next tokens, the same on every rank; the loss function of transformers' causal models.

    Args:
        logits: ``[b, s, v]``, a DTensor whose last dimension is split; or of each rank its part ``[b, s, v_r]``, with ``mesh``.
        labels: ``[b, s]``, the tokens themselves: row ``i`` predicts label ``i + 1``. ``ignore_index`` where there is none.
        vocab_size: taken from ``logits``.
        num_items_in_batch: what the sum of losses is divided by; the number of labels.
        shift_labels: labels that are already shifted, in place of ``labels``.
        mesh: the ranks, of one dimension, where ``logits`` is no DTensor.
    """
    if isinstance(logits, DTensor):
        mesh, logits = logits.device_mesh, arrange(logits, logits.device_mesh, Shard(-1), Shard(-1))
    elif mesh is None:
        raise OperandError(f"logits is a {type(logits).__name__}: give a DTensor whose last dimension is split, or this rank's part of it and mesh=")
    targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
    targets = targets.reshape(-1).to(logits.device)
    losses = _CrossEntropy.apply(logits.flatten(0, -2), targets.masked_fill(targets == ignore_index, -1), mesh)
    return losses.sum() / ((targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)
