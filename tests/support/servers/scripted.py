"""A model whose answers a test writes: the server and all above the engine run as they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from importlib import import_module

import mlx.core as mx
import tiny
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny import CHAT_TEMPLATE, random_model

from redrafter_mlx.config import PLAIN
from redrafter_mlx.decoding.text import AnswerText, TextStream
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.request import Request
from redrafter_mlx.response import Response, StepResult

MARKS = ("<think>", "</think>")
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    + CHAT_TEMPLATE.replace(
        "{{ m['content'] }}",
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m['content'] }}{% for c in m.tool_calls %}[{{ c.id }} {{ c.function | tojson }}]"
        "{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}",
    )
)
STEP = 3  # tokens

Script = Callable[[str], str]
"""Returns the answer to a rendered prompt; the model ends it."""


def marked_tokenizer(parser: str, template: str) -> TokenizerWrapper:
    """Return a tokenizer of bytes and of the marks of reasoning, with a parser of mlx-lm."""
    return tiny.marked_tokenizer(import_module(f"mlx_lm.tool_parsers.{parser}"), template, MARKS)


class Scripted(Redrafter):
    """Answers by a script, without a step of the target; stop strings and grammars apply.

    rendered: the rendered prompts so far
    script:  writes the answers
    cached:  number of prompt tokens that count as cached
    """

    script: Script
    cached = 0

    def __init__(
        self, parser: str = "json_tools", template: str = TEMPLATE, context: int = 10**6
    ) -> None:
        tokenizer = marked_tokenizer(parser, template)
        model = random_model(max_position_embeddings=context, vocab_size=len(tokenizer))
        super().__init__(model, tokenizer)
        self.rendered: list[str] = []

    async def arespond(self, request: Request) -> AsyncGenerator[Response, None]:
        prompt, options = list(request.prompt), request.options
        self.rendered.append(str(self.tokenizer.decode(prompt)))
        (end,) = self.tokenizer.eos_token_ids
        answer = self.tokenizer.encode(self.script(self.rendered[-1]), add_special_tokens=False)
        tokens = [*answer, end]
        text = AnswerText(
            TextStream(self.token_text), [end], options.stop, options.max_tokens, request.constraint
        )
        for number, token in enumerate(tokens):
            index = number % STEP
            step = tokens[number - index : number - index + STEP]
            shown = text.add(token)
            yield Response(
                text=shown, token=token, source="model", prompt_tokens=len(prompt),
                prompt_tps=1e6, cached_tokens=self.cached, generation_tokens=number + 1,
                generation_tps=1e3, peak_memory=0.0, finish_reason=text.finish_reason,
                steps=number // STEP, tokens_per_step=1.0, usual_shape=None, usual_nodes=None,
                step=StepResult(step, ["model"] * len(step), [], [0], [0], PLAIN, 1,
                                log_probs=self._log_probs(step) if options.logprobs else None),
                index=index, stop=text.stop,
            )  # fmt: skip
            if text.finish_reason is not None:
                return

    def _log_probs(self, tokens: list[int]) -> list[mx.array]:
        """Return log-probabilities [V] of each token: 0 its own, that of token i -1 - i / 1000."""
        others = -1 - mx.arange(self.target.vocab_size) / 1000
        found = [mx.where(mx.arange(len(others)) == token, 0.0, others) for token in tokens]
        mx.eval(found)
        return found
