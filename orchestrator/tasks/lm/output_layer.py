"""The loss of a ``transformers`` model at its output layer, without the logits of all tokens.

The model runs as it is, except that its output layer keeps the hidden states and returns no rows. The loss is
then computed from the hidden states in chunks, still within the model's own call: the hooks of FSDP have
gathered the output layer, and find the loss among the outputs.

Some families transform the products of the output layer: they multiply them (Granite, Cohere) or cap them
(Gemma). Before the first pass the model's own code computes the logits of a few hidden states and of known
numbers in place of products. A model whose logits differ from those of the known transforms has whole logits.

Shapes: B samples of a batch, S tokens of a sample, R rows of logits, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from experts.kernels.autocast import without_autocast
from experts.moe.bank import computing_dtype
from orchestrator.tasks.token_loss import PLAIN, LogitTransform, has_large_logits, token_loss

_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
_ATTRIBUTE = "_output_loss"
_PROBE_EXPONENT = 4.0
"""The power of ten of the largest probe. Every soft cap of a model changes so large a number."""
_PROBE_TOLERANCE = 4
"""In multiples of the relative precision: families round their logits after each operation."""
_PRODUCT_TOLERANCE = 4
"""In multiples of the root of the precision: two products of one matrix may be summed in other orders."""


def call_with_labels(
    model: nn.Module, labels_BS: Tensor, inputs: Mapping[str, Any], note: Callable[[str], None]
) -> Any:
    """Call a model. Its outputs have the sum of the loss over the labels or, if it is None, whole logits.

    ``note`` tells the user why a model with many logits has whole ones."""
    handle: Any = model
    if not has_large_logits(labels_BS.shape[1], handle.config.get_text_config().vocab_size):
        return model(**inputs)
    if _ATTRIBUTE not in model.__dict__:
        model.__dict__[_ATTRIBUTE] = OutputLoss(model, note)
    return model.__dict__[_ATTRIBUTE].call(model, labels_BS, inputs)


class OutputLoss:
    """The output layer of a model, which computes the loss of labels where a call has them."""

    def __init__(self, model: nn.Module, note: Callable[[str], None]) -> None:
        handle: Any = model
        head = handle.get_output_embeddings()
        self.obstacle = _obstacle(model, head)
        """Why this model has whole logits; None if it needs none."""
        self._note = note
        self._was_told = False
        self._transforms = list(_possible_transforms(model))
        self._transform: LogitTransform | None = None
        """None until it is found."""
        self._takes_hidden = False
        self._hidden_BSDs: list[Tensor] = []
        self._head: nn.Linear = head
        self._model_forward = handle.forward
        if self.obstacle is None:
            self._head_forward = head.forward
            head.forward = self._forward_head
            handle.forward = self._forward_model

    def call(self, model: nn.Module, labels_BS: Tensor, inputs: Mapping[str, Any]) -> Any:
        """Call the model; see ``call_with_labels``."""
        if computing_dtype(labels_BS) == torch.float16:
            self.obstacle = "in fp16 gradients are scaled before they are rounded"
        if self.obstacle is None and self._transform is None:
            self._find_transform(model, labels_BS, inputs)
        if self.obstacle is None:
            outputs = model(loss_labels=labels_BS, **inputs)
        else:
            outputs = model(**inputs)
        if self.obstacle is not None and not self._was_told and not isinstance(labels_BS, FakeTensor):
            self._was_told = True
            self._note(
                f"the loss takes the logits of all tokens at once, and memory for them: {self.obstacle}"
            )
        return outputs

    def _forward_model(self, *arguments: Any, loss_labels: Tensor | None = None, **inputs: Any) -> Any:
        """Run the model's own forward pass and, if there are labels, compute their loss."""
        if loss_labels is None:
            return self._model_forward(*arguments, **inputs)
        if self._transform is None:
            return self._try_output_layer(inputs)
        self._takes_hidden = True
        try:
            outputs = self._model_forward(*arguments, **inputs)
        finally:
            self._takes_hidden = False
            hidden_BSDs = self._hidden_BSDs
            self._hidden_BSDs = []
        if [hidden_BSD.shape[:-1] for hidden_BSD in hidden_BSDs] != [loss_labels.shape]:
            self.obstacle = "the model does not give the hidden states of all tokens to its output layer"
            return self._model_forward(*arguments, **inputs)
        hidden_TD = hidden_BSDs[0].flatten(0, 1)
        labels_T = loss_labels.flatten()
        head = self._head
        outputs["loss"] = token_loss(
            hidden_TD, head.weight, labels_T, head.bias, self._transform, ignore=True
        ).sum
        return outputs

    def _forward_head(self, hidden_BSD: Tensor) -> Tensor:
        """Return the products; in a pass with labels keep the hidden states, and return no rows."""
        if not self._takes_hidden:
            return self._head_forward(hidden_BSD)
        self._hidden_BSDs.append(hidden_BSD)
        if self._transform is None:
            products_BSV = self._head_forward(hidden_BSD)
            return torch.cat([products_BSV, _probe(products_BSV)], 1)
        return hidden_BSD.new_empty((len(hidden_BSD), 0, self._head.out_features))

    # --- the function from products to logits

    def _find_transform(self, model: Any, labels_BS: Tensor, inputs: Mapping[str, Any]) -> None:
        """Try the model's own way from hidden states to logits on a few tokens of the first batch.

        Its body does not run: it may exchange tokens with other hosts, and is compiled for whole batches."""
        if isinstance(labels_BS, FakeTensor):
            self._transform = PLAIN  # a trace has no values, and no transform needs more memory
            return
        few = {name: value[:2, :4] for name, value in inputs.items() if isinstance(value, Tensor)}
        with torch.no_grad(), _without_body(model, self._head):
            # Not compiled. Within the model's call: its hooks gather an output layer in shards.
            model._call_impl(loss_labels=labels_BS, use_cache=False, **few)

    def _try_output_layer(self, inputs: Mapping[str, Any]) -> None:
        self._takes_hidden = True
        try:
            logits_BRV = self._model_forward(**inputs).logits
            (hidden_BSD,) = self._hidden_BSDs
        except Exception as error:  # of a model that expects more from its body
            self.obstacle = (
                f"the output layer does not run without the body ({type(error).__name__}: {error})"
            )
            return
        finally:
            self._takes_hidden = False
            self._hidden_BSDs = []
        num_samples, num_tokens, _ = hidden_BSD.shape
        if logits_BRV.shape != (num_samples, 2 * num_tokens, self._head.out_features):
            self.obstacle = "the model does not return all products of its output layer as logits"
            return
        self._transform = self._agreeing_transform(hidden_BSD, logits_BRV)
        if self._transform is None:
            self.obstacle = "the model changes the products of its output layer in an unknown way"

    def _agreeing_transform(self, hidden_BSD: Tensor, logits_BRV: Tensor) -> LogitTransform | None:
        """Return the transform that turns products into the model's logits; None if there is none."""
        dtype = computing_dtype(hidden_BSD)
        epsilon = max(torch.finfo(dtype).eps, torch.finfo(logits_BRV.dtype).eps)
        own_BSV, known_BSV = logits_BRV.chunk(2, 1)
        probe_BSV = _probe(known_BSV.to(dtype))

        def difference(transform: LogitTransform) -> float:
            expected_BSV = transform(probe_BSV)
            return float(((known_BSV - expected_BSV) / expected_BSV).abs().max())

        best = min(self._transforms, key=difference)
        if not difference(best) <= _PROBE_TOLERANCE * epsilon:
            return None
        # The products must be the model's, too.
        with without_autocast(hidden_BSD):
            bias_V = None if self._head.bias is None else self._head.bias.to(dtype)
            products_BSV = F.linear(hidden_BSD.to(dtype), self._head.weight.to(dtype), bias_V)
        off = (own_BSV - best(products_BSV)).abs().max()
        # Not "<=": weights that are not finite prove nothing.
        return None if bool(off > _PRODUCT_TOLERANCE * epsilon**0.5 * own_BSV.abs().max()) else best


@contextmanager
def _without_body(model: Any, head: nn.Linear) -> Iterator[None]:
    """Let the body of a model return hidden states of any values, the same on each host."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    def forward(input_ids: Tensor, **_: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        hidden_BSD: Any = torch.randn((*input_ids.shape, head.in_features), generator=generator)
        return MoeModelOutputWithPast(last_hidden_state=hidden_BSD.to(head.weight))

    body = model.get_decoder()
    own_forward = body.__dict__.get("forward")
    body.forward = forward
    try:
        yield
    finally:
        del body.forward
        if own_forward is not None:
            body.forward = own_forward


def _obstacle(model: Any, head: Any) -> str | None:
    """Return why the output layer of a model cannot be replaced by the loss."""
    if head is None:
        return "the model names no output layer"
    if hasattr(head, "lora_A"):
        return "the output layer has adapters"
    if type(head) is not nn.Linear:
        return f"the output layer is a {type(head).__name__}"
    if "forward" in head.__dict__ or head._forward_hooks or head._forward_pre_hooks:
        return "the output layer has hooks"
    if model.base_model is model or model.get_decoder() in (None, model):
        return "the model does not name its body"
    within = {id(p) for module in (model.base_model, head) for p in module.parameters()}
    others = [name for name, p in model.named_parameters() if id(p) not in within]
    if others:
        # Weights that change logits may change nothing before they are trained.
        return f"the model has weights beside its body and its output layer ({', '.join(others[:2])})"
    return None


def _possible_transforms(model: nn.Module) -> Iterator[LogitTransform]:
    """Yield the functions that the settings of a model may mean."""
    config: Any = model.config
    of_text = config.get_text_config()
    scales = [value for name in _SCALES if (value := getattr(of_text, name, None))]
    softcaps = [value for name in _SOFTCAPS if (value := getattr(of_text, name, None))]
    factors = [1.0, *scales, *(1 / scale for scale in scales)]
    yield from (LogitTransform(float(scale), float(cap)) for scale, cap in product(factors, [0.0, *softcaps]))


def _probe(like: Tensor) -> Tensor:
    """Return rows of numbers of all magnitudes and both signs."""
    vocabulary = like.shape[-1]
    exponents = torch.linspace(-_PROBE_EXPONENT, _PROBE_EXPONENT, vocabulary, device=like.device)
    signs = 1 - 2 * (torch.arange(vocabulary, device=like.device) % 2)
    return (signs * 10.0**exponents).to(like.dtype).expand_as(like)
