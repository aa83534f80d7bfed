"""Plots as inline SVG and HTML: they use the page's own type, stay sharp in print and need no library."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from crossward.evaluate.table import percent
from crossward.federation.errors import BadInput

_LARGEST_THUMBNAIL = 256  # pixels on the longer side
_PALE, _DEEP = np.array([247.0, 251.0, 255.0]), np.array([8.0, 48.0, 107.0])  # one hue: lightness carries the value

# Blue against orange is told apart with every common colour blindness; shapes and dashes say the same again.
STYLE = """
:root{--ink:#1b2733;--soft:#566472;--rule:#d5dce3;--wash:#f4f7fa;--blue:#0072b2;--orange:#b35900;--deep:#08306b}
*{box-sizing:border-box}
body{margin:0;color:var(--ink);background:#fff;-webkit-print-color-adjust:exact;print-color-adjust:exact;
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main{max-width:64rem;margin:0 auto;padding:2rem 1.25rem 3rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .35rem;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.6rem 0 .3rem;padding-top:1rem;border-top:2px solid var(--deep)}
h3{font-size:.95rem;margin:0;overflow-wrap:anywhere}
p{margin:.4rem 0;max-width:46rem}.soft{color:var(--soft);font-size:.9rem}
.notice{margin:1rem 0;padding:.8rem 1rem;border-left:6px solid var(--blue);background:#e9f3fa}
.warning{border-color:var(--orange);background:#fff3e3}
.notice ul{margin:.3rem 0 0;padding-left:1.2rem}.notice p{margin:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:.8rem;margin:1.4rem 0}
.tile{background:var(--wash);padding:.9rem 1rem;border-top:3px solid var(--blue)}.tile.worst{border-color:var(--orange)}
.tile b{display:block;font-size:1.8rem;line-height:1.2;font-variant-numeric:tabular-nums;white-space:nowrap}
.tile small{font-size:1rem;font-weight:500;color:var(--soft)}
.tile span{font-size:.88rem;color:var(--soft);overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin:.8rem 0}table.wide{width:100%}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.45rem .6rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--rule);white-space:nowrap}
thead th{color:var(--soft);font-weight:600;vertical-align:bottom;border-bottom:2px solid var(--ink);white-space:normal}
th.words,td.words{text-align:left;white-space:normal;overflow-wrap:break-word;min-width:6.5rem}
tbody th{font-weight:600;white-space:normal;min-width:8rem;overflow-wrap:break-word;hyphens:auto}
th:first-child,td:first-child{text-align:left}
tr.sum>*{background:var(--wash)}tr.first>*{border-top:2px solid var(--ink)}tr.best>*{background:#e9f3fa}
.notes{font-size:.85rem;color:var(--soft);padding:0;list-style:none;margin:.3rem 0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(14.5rem,1fr));gap:1rem;margin:1rem 0}
figure{margin:0;break-inside:avoid}
svg{display:block}svg.chart{width:100%;height:auto}svg.bar{width:124px;height:16px;margin-top:.2rem}
svg text{font-size:12px;fill:var(--soft)}
svg line{stroke-width:1}line.grid,line.track{stroke:var(--rule)}
svg polyline{fill:none;stroke-linejoin:round;stroke-linecap:round}
polyline.other{stroke:#c3ccd5;stroke-width:1.2}polyline.own{stroke:var(--blue);stroke-width:2.6}
polyline.received{stroke:var(--orange);stroke-width:1.8;stroke-dasharray:2 4}
circle.own{fill:var(--blue)}circle.received{fill:#fff;stroke:var(--orange);stroke-width:2}
circle.best{fill:#fff;stroke:var(--blue);stroke-width:2.6}
svg line.interval{stroke:var(--blue);stroke-width:3}svg line.guess{stroke:var(--ink);stroke-width:1.5}
.key{display:flex;flex-wrap:wrap;gap:.3rem 1.3rem;font-size:.88rem;color:var(--soft);margin:.5rem 0}
.key span{display:inline-flex;align-items:center;gap:.45rem}.key svg{width:30px;height:12px;flex:none}
.heat td,.heat th{border:2px solid #fff;text-align:center;vertical-align:middle}
.heat td{padding:.55rem .7rem;min-width:3.4rem}.heat tbody th{text-align:right;max-width:14rem}
.heat thead th{color:var(--ink);max-width:9rem;white-space:normal;vertical-align:bottom}
.heat td.home{outline:2px solid var(--orange);outline-offset:-4px;font-weight:700}
.heat.many thead span{writing-mode:vertical-rl;transform:rotate(180deg);max-height:10rem}
.sample{display:grid;grid-template-columns:12rem 1fr;gap:1rem;align-items:center;margin:.6rem 0}
.strip{display:grid;grid-template-columns:repeat(8,1fr);gap:3px}
.strip img{width:100%;aspect-ratio:1;object-fit:contain;background:#000;image-rendering:pixelated;display:block}
dl{display:grid;grid-template-columns:12rem 1fr;gap:.7rem 1rem;margin:.8rem 0}
dt{font-weight:600}dd{margin:0;max-width:42rem}
.state{display:inline-block;padding:0 .55rem;margin-right:.5rem;font-weight:700;font-size:.85rem;
 border:1.5px solid var(--orange);color:var(--orange)}
.state.on{background:var(--blue);border-color:var(--blue);color:#fff}
details{margin:.6rem 0;border-bottom:1px solid var(--rule);padding-bottom:.4rem}
summary{cursor:pointer;font-weight:600;padding:.3rem 0}
code{font:.86rem/1.5 ui-monospace,"SF Mono",Consolas,monospace;overflow-wrap:anywhere}
footer{margin-top:3rem;padding-top:.8rem;border-top:1px solid var(--rule);color:var(--soft);font-size:.85rem}
thead th[scope=colgroup]{text-align:center}figure.one{max-width:40rem;margin:.6rem 0}
svg line.threshold{stroke:var(--ink);stroke-dasharray:1 4}svg rect.frame{fill:#fff;stroke:var(--rule)}
svg path{fill-opacity:.8}
.maps{display:grid;grid-template-columns:repeat(auto-fit,minmax(14rem,1fr));gap:1rem;max-width:44rem;margin-bottom:1.4rem}
.scans{display:grid;grid-template-columns:repeat(auto-fill,minmax(14rem,1fr));gap:1rem;margin:1rem 0}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:3px}
.pair img{width:100%;aspect-ratio:1;object-fit:contain;background:#000;image-rendering:pixelated;display:block}
.scans figcaption{display:grid;font-size:.85rem;color:var(--soft);overflow-wrap:anywhere}
@media screen and (max-width:44rem){main{padding:1.2rem .9rem 2rem}h1{font-size:1.5rem}th,td{padding:.4rem .45rem}
 dl,.sample{grid-template-columns:1fr;gap:.3rem}dd{margin-bottom:.7rem}
 .strip{grid-template-columns:repeat(4,1fr)}.strip img:nth-child(n+5){display:none}
 .tiles{grid-template-columns:1fr 1fr}.tile{padding:.7rem}.tile b{font-size:1.4rem}
 .heat td{padding:.5rem .3rem;min-width:2.6rem}.heat tbody th{min-width:6rem}
 .heat thead span{writing-mode:vertical-rl;transform:rotate(180deg);max-height:10rem}
 .cards thead{display:none}.cards,.cards tbody,.cards tr,.cards th,.cards td{display:block;border:0}
 .cards tr{padding:.6rem 0;border-top:1px solid var(--rule)}.cards tr.first{border-top:2px solid var(--ink)}
 .cards th,.cards td{padding:.1rem .45rem}.cards th{font-size:1rem}
 .cards td{display:flex;justify-content:space-between;gap:1rem}.cards td.blank{display:none}
 .cards td::before{content:attr(data-label);color:var(--soft)}}
@media print{@page{margin:15mm}html{font-size:70%}body{font-size:1rem}main{max-width:none;padding:0}
 .scroll{overflow:visible}h2{break-after:avoid;margin-top:1.6rem}tr,.tile,.notice,.heat{break-inside:avoid}
 tr.sum{break-before:avoid}.key,h2+p{break-after:avoid}svg.bar{width:90px;height:12px}}
"""

_MARKS = {
    "own": '<line class="interval" x1="2" x2="28" y1="6" y2="6"/><circle class="own" cx="15" cy="6" r="4.5"/>',
    "ring": '<circle class="received" cx="15" cy="6" r="4"/>',
    "tick": '<line class="guess" x1="15" x2="15" y1="0" y2="12"/>',
    "line": '<polyline class="own" points="2,6 28,6"/>',
    "dash": '<polyline class="received" points="2,6 28,6"/>',
    "grey": '<polyline class="other" points="2,6 28,6"/>',
    "best": '<circle class="best" cx="15" cy="6" r="4.5"/>',
}


class Html(str):
    """Text that is already markup. Any other text is escaped by `tag`."""

    __slots__ = ()


def tag(name: str, *children: Any, **attributes: Any) -> Html:
    """An element. Children that are not Html are escaped, attribute values always; `class_` gives `class`."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{shown}>{join(*children)}</{name}>")


def join(*children: Any) -> Html:
    """Markup of several pieces, each escaped unless it is Html."""
    return Html("".join(child if isinstance(child, Html) else html.escape(str(child)) for child in children))


def rounds_chart(result: Mapping[str, Any], site: str) -> Html:
    """Validation accuracy of one hospital by round, before the grey lines of the others; the best round is marked."""
    rounds, chart = result["rounds"], _Chart(len(result["rounds"]))
    parts = [chart.axes()]
    others = [other for other in result["sites"] if other != site]
    parts += [chart.line(_series(rounds, other, "val_accuracy"), "other") for other in others]
    received, refreshed = (_series(rounds, site, key) for key in ("val_accuracy_as_received", "val_accuracy"))
    parts += [chart.line(received, "received"), chart.line(refreshed, "own")]
    numbers = [entry["round"] for entry in rounds]
    if result.get("best_round") in numbers:
        index = numbers.index(result["best_round"])
        if (share := refreshed[index]) is not None:
            parts.append(chart.dot(index, share, "best"))
    return chart.draw(parts, title=_in_words(site, numbers, refreshed))


def interval_bar(site: Mapping[str, Any]) -> Html:
    """Accuracy (dot) with its interval (line), accuracy as received (ring), the commonest class's share (tick)."""
    parts, words = [tag("line", class_="track", x1=4, x2=136, y1=9, y2=9)], []

    def x(share: float) -> str:
        return f"{4 + 132 * share:.1f}"

    counts = [entry["n"] for entry in (site.get("per_class") or {}).values()]
    if sum(counts):
        parts.append(
            tag("line", class_="guess", x1=x(max(counts) / sum(counts)), x2=x(max(counts) / sum(counts)), y1=2, y2=16)
        )
        words.append(f"always naming the commonest class {percent(max(counts) / sum(counts))} %")
    if site.get("accuracy_interval"):
        low, high = site["accuracy_interval"]
        parts.append(tag("line", class_="interval", x1=x(low), x2=x(high), y1=9, y2=9))
    received = (site.get("as_received") or {}).get("accuracy")
    if received is not None:
        parts.append(tag("circle", class_="received", cx=x(received), cy=9, r=4))
        words.append(f"as received {percent(received)} %")
    if site.get("accuracy") is not None:
        parts.append(tag("circle", class_="own", cx=x(site["accuracy"]), cy=9, r=4.5))
        words.append(f"accuracy {percent(site['accuracy'], site.get('accuracy_interval'))} %")
    return _svg(140, 18, parts, title=", ".join(reversed(words)) or "accuracy undefined", klass="bar")


def heat_map(matrix: Mapping[str, Any]) -> Html:
    """Accuracy of the model of a row on the test images of a column, as a shaded table with the numbers in it."""
    names = matrix["sites"]
    head = tag("tr", tag("td"), *(tag("th", tag("span", name), scope="col") for name in names))
    body = []
    for index, (name, row) in enumerate(zip(names, matrix["accuracy"], strict=True)):
        cells = [_shaded(value, home=index == column) for column, value in enumerate(row)]
        body.append(tag("tr", tag("th", name, scope="row"), *cells))
    return tag("table", tag("thead", head), tag("tbody", *body), class_="heat many" if len(names) > 4 else "heat")


def thumbnail(image: npt.NDArray[Any], *, alt: str) -> Html:
    """One uint8 image, [h, w] or [h, w, 3], as an inline PNG."""
    if image.dtype != np.uint8 or not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)) or not image.size:
        raise BadInput(
            f"a sample image has shape {list(image.shape)} and type {image.dtype}: give uint8 of [h, w] or [h, w, 3]"
        )
    picture = Image.fromarray(np.ascontiguousarray(image))
    picture.thumbnail((_LARGEST_THUMBNAIL, _LARGEST_THUMBNAIL))
    png = io.BytesIO()
    picture.save(png, format="PNG")
    return Html(
        f'<img src="data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}" alt="{html.escape(alt)}">'
    )


def caution(result: Mapping[str, Any]) -> Html:
    """What stands above pictures of patients; nothing above phantoms."""
    if result["data"].get("phantom"):
        return Html()
    words = "These are pictures of real patients' scans: do not pass this page on outside the hospital."
    return tag("p", tag("strong", words))


def legend(**entries: str) -> Html:
    """What the marks of a plot mean: `legend(dash="as received")`."""
    drawn = {name: Html(f'<svg viewBox="0 0 30 12" aria-hidden="true">{_MARKS[name]}</svg>') for name in entries}
    return tag("div", *(tag("span", drawn[name], words) for name, words in entries.items()), class_="key")


class _Chart:
    """A small line chart of shares between 0 and 1 over rounds; missing rounds leave a gap."""

    width, height, left, right, top, bottom = 280, 168, 38, 10, 10, 26

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def x(self, index: int) -> float:
        span = self.width - self.left - self.right
        return self.left + (span * index / (self.rounds - 1) if self.rounds > 1 else span / 2)

    def y(self, share: float) -> float:
        return self.top + (self.height - self.top - self.bottom) * (1 - share)

    def axes(self) -> Html:
        parts = []
        for share in (0.0, 0.5, 1.0):
            level = f"{self.y(share):.1f}"
            parts.append(tag("line", class_="grid", x1=self.left, x2=self.width - self.right, y1=level, y2=level))
            parts.append(tag("text", f"{share:.0%}", x=self.left - 6, y=f"{self.y(share) + 4:.1f}", text_anchor="end"))
        for index in sorted({0, self.rounds - 1} if self.rounds else ()):
            label = tag("text", index + 1, x=f"{self.x(index):.1f}", y=self.height - 8, text_anchor="middle")
            parts.append(label)
        middle = (self.left + self.width - self.right) / 2
        return join(*parts, tag("text", "round", x=middle, y=self.height - 8, text_anchor="middle"))

    def line(self, series: Sequence[float | None], klass: str) -> Html:
        runs: list[list[int]] = [[]]
        for index, value in enumerate(series):
            if value is not None:
                runs[-1].append(index)
            elif runs[-1]:
                runs.append([])
        parts = []
        for run in filter(None, runs):
            points = " ".join(f"{self.x(i):.1f},{self.y(share):.1f}" for i in run if (share := series[i]) is not None)
            if len(run) > 1:
                parts.append(tag("polyline", class_=klass, points=points))
            elif klass == "own":
                parts.append(self.dot(run[0], series[run[0]] or 0.0, klass))
        return join(*parts)

    def dot(self, index: int, share: float, klass: str) -> Html:
        return tag(
            "circle", class_=klass, cx=f"{self.x(index):.1f}", cy=f"{self.y(share):.1f}", r=2.5 if klass == "own" else 5
        )

    def draw(self, parts: Sequence[Html], *, title: str) -> Html:
        return _svg(self.width, self.height, parts, title=title, klass="chart")


def _svg(width: int, height: int, parts: Sequence[Html], *, title: str, klass: str) -> Html:
    return tag(
        "svg", tag("title", title), *parts, class_=klass, viewBox=f"0 0 {width} {height}", role="img", aria_label=title
    )


def _shaded(value: float | None, *, home: bool) -> Html:
    klass = "home" if home else "away"
    if value is None:
        return tag("td", "n/a", class_=klass)
    depth = value**2  # spends the shades where models differ, above one half
    shade = _PALE + (_DEEP - _PALE) * depth
    ink = "#fff" if depth > 0.65 else "#000"
    background = ",".join(f"{channel:.0f}" for channel in shade)
    return tag("td", f"{100 * value:.0f}", class_=klass, style=f"background:rgb({background});color:{ink}")


def _series(rounds: Sequence[Mapping[str, Any]], site: str, key: str) -> list[float | None]:
    return [(entry["sites"].get(site) or {}).get(key) for entry in rounds]


def _in_words(site: str, numbers: Sequence[int], series: Sequence[float | None]) -> str:
    known = [(number, value) for number, value in zip(numbers, series, strict=True) if value is not None]
    if not known:
        return f"Validation accuracy of {site} by round: not measured"
    (first, start), (last, end) = known[0], known[-1]
    return (
        f"Validation accuracy of {site} by round: {percent(start)} % in round {first}, {percent(end)} % in round "
        f"{last}, highest {percent(max(value for _, value in known))} %"
    )
