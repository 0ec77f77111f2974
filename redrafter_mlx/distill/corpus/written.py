"""A written corpus as it is trained on: which of its shards, and which texts are held out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from redrafter_mlx.distill.corpus.examples import held_out_blocks, hold_out, sample_texts
from redrafter_mlx.distill.corpus.folder import CorpusJob
from redrafter_mlx.distill.corpus.reader import Reader
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.corpus.writing.writer import Writer


@dataclass(frozen=True)
class WrittenCorpus:
    """The first `blocks` of a corpus, made by `source`."""

    job: CorpusJob
    source: Writer | Reader
    blocks: int

    @property
    def shards(self) -> list[Path]:
        """The shards, one per block."""
        return [self.job.path(block) for block in range(self.blocks)]

    @cached_property
    def parts(self) -> tuple[list[Path], list[Text]]:
        """The shards of texts to train on, and held-out texts; errors as of `hold_out`."""
        return hold_out(self.shards, self.source.held_out, self.job.extras)

    @property
    def only_read(self) -> list[Path]:
        """The shards of texts that were only read, to train on as well."""
        # A block that is held out for want of others was read with its own prompts.
        apart = held_out_blocks(self.shards, self.source.held_out)
        return [
            read
            for block, shard in enumerate(self.shards)
            if block not in apart or self.source.held_out(block)
            for read in self.job.extras.read_shards(shard)
        ]

    def sample(self) -> list[Text]:
        """Return some texts that are trained on, a quarter as many tokens as are held out."""
        trained_on, held_out = self.parts
        few = max(1, sum(len(text.answer) for text in held_out) // 4)
        return sample_texts(trained_on, few, self.job.extras)

    def prompts(self, count: int) -> list[list[int]]:
        """Return up to `count` held-out prompts, of all lengths."""
        prompts = sorted((text.prompt for text in self.parts[1]), key=len)
        return prompts[:: max(1, len(prompts) // max(1, count))][:count]
