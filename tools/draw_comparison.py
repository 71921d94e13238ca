"""Draw docs/images/comparison.svg from the tables of benchmarks/results: python -m tools.draw_comparison"""

import re
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "real-speech.md"
PICTURE = ROOT / "docs" / "images" / "comparison.svg"
WIDTH, LEFT, RIGHT, BAR, STEP = 760, 310, 80, 20, 30
OURS, OTHERS = "#2563eb", "#94a3b8"
Bars = list[tuple[str, float]]


def speeds(text: str) -> Bars:
    """Return the RTFx of the first table of speeds, ours first."""
    rows = re.findall(
        r"^\| \*{0,2}([^|*]+)\*{0,2}[^|]*\| [^|]+ \| ([\d.]+) \|[^|]*\| [\d.]+ % \| [\d.]+ \|$", text, re.M
    )
    names = [name.strip().partition(" (")[0].replace("ours", "asr-server") for name, _ in rows]
    return [(name, float(rtfx)) for name, (_, rtfx) in zip(names, rows, strict=True)]


def error_rates(text: str) -> Bars:
    (row,) = re.findall(r"^\| \*\*all English \(17,646\)\*\* \| ([\d.]+) % .*?\| ([\d.]+) % ", text, re.M)
    return [("asr-server", float(row[0])), ("faster-whisper, float32", float(row[1]))]


def panel(title: str, bars: Bars, unit: str, top: int) -> list[str]:
    most = max(value for _, value in bars)
    lines = [f'<text x="20" y="{top}" font-weight="bold">{escape(title)}</text>']
    for number, (name, value) in enumerate(bars):
        y = top + 14 + number * STEP
        length = round((WIDTH - LEFT - RIGHT) * value / most, 1)
        colour = OTHERS if number else OURS
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length}" height="{BAR}" rx="3" fill="{colour}"/>',
            f'<text x="{LEFT + length + 8}" y="{y + 15}">{value:.1f}{unit}</text>',
        ]
    return lines


def picture() -> str:
    text = RESULTS.read_text()
    fast, wrong = speeds(text), error_rates(text)
    second = 60 + STEP * len(fast) + 30
    height = second + STEP * len(wrong) + 30
    parts = [
        *panel("whisper-base on two CPU cores: seconds of audio in a second (more is better)", fast, "", 36),
        *panel("Word error rate on 17,646 English words (less is better)", wrong, " %", second),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="system-ui, sans-serif" font-size="14" fill="#1e293b">\n'
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#f8fafc"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
