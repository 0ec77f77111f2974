# ruff: noqa: RUF001
"""Texts that are hard for tokenizers."""

from __future__ import annotations

HARD_STRINGS = [
    "", " ", "  ", "hello world", " leading", "trailing  ", "a  b   c    d", "\t\ttabs\t",
    "line\nline\n\n\nline\r\nline", "def f(x):\n    return x ** 2  # squared\n\n",
    'for (int i = 0; i < n; ++i) { printf("%d\\n", a[i]); }', "<div class='x'>&amp;</div>",
    "1234567890", "3.14159 and 1,000,000.00", "v1.2.3-rc4 0x7fff 1e-9", "½ ² Ⅷ ٣ 四 ①",
    "I'm you're he'll they'd we've it's don't DON'T", "l'été, où ça ?", "naïve Ångström ﬁ ǅ",
    "e\u0301 n\u0303 a\u0328\u0301", "日本語の文章。漢字、カタカナ、ひらがな",
    "한국어 문장", "中文，标点！",
    "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "ไทยไม่มีเว้นวรรค",
    "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 👍🏽 🇫🇷", "a\u00a0b\u2003c\u3000d\u200be\ufefff",
    "\u0000\u0001\u007f\u0085",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff", "----====____****", "....!?!?...", "aaaaaaaaaaaaaaaaaaaaaaaaa",
    "\\alpha_{i}^{2} = \\frac{1}{2}", "user@example.org https://example.org/a?b=c&d=%20#e",
    "CamelCase snake_case kebab-case SCREAMING", "\n \n  \n   x", " \n", "x \n y", "Ġ Ċ â",
    "|<im_end>| < |im_end| >", "end.\nnext",
]  # fmt: skip
