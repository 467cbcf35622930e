"""The report's style sheet: system fonts, one measure of text, tables that scroll in themselves on a
phone."""

CSS = """
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #5c6570; --paper: #fcfcfa; --panel: #f3f3ef;
  --line: #dcdcd4; --link: #0b5cad; --good: #1f7a4d; --bad: #b3401f; --open: #8a6d1a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6e8; --soft: #9aa3ad; --paper: #15181b;
  --panel: #1d2125; --line: #33393f; --link: #7db7f2; --good: #5cc490; --bad: #f08a66; --open: #d9b95c; } }
* { box-sizing: border-box; }
html { font-size: 100%; -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 5rem; max-width: 62rem; background: var(--paper);
  color: var(--ink); overflow-wrap: break-word; line-height: 1.6;
  font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "PingFang SC", "Microsoft YaHei",
    "Noto Sans CJK SC", "WenQuanYi Micro Hei", sans-serif; }
h1 { font-size: clamp(1.6rem, 4vw, 2.3rem); line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .75rem;
  text-wrap: balance; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 3.2rem 0 1rem; padding-top: .9rem; border-top: 1px solid
  var(--line); }
h3 { font-size: 1rem; margin: 0 0 .4rem; display: flex; flex-wrap: wrap; gap: .3rem .75rem; align-items:
  baseline;
  justify-content: space-between; }
p { margin: 0 0 .9rem; max-width: 44rem; }
a { color: var(--link); text-decoration-color: color-mix(in srgb, var(--link) 35%, transparent);
  text-underline-offset: .18em; }
a:hover { text-decoration-color: currentColor; }
code { font: .86em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.lead { font-size: 1.2rem; line-height: 1.5; }
.meta p, .small { font-size: .85rem; color: var(--soft); margin: 0 0 .2rem; }
nav ol { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.2rem; margin: 1.5rem 0 0; padding: 0;
  font-size: .9rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
.card { background: var(--panel); border-radius: .5rem; border-left: .3rem solid var(--soft);
  padding: 1rem 1.15rem .35rem; }
.card.good { border-color: var(--good); } .card.bad { border-color: var(--bad); } .card.open {
  border-color: var(--open); }
.badge { font-size: .8rem; font-weight: 600; color: var(--soft); white-space: nowrap; }
.good > h3 > .badge { color: var(--good); } .bad > h3 > .badge { color: var(--bad); }
.open > h3 > .badge { color: var(--open); }
.scroll { overflow-x: auto; margin: 1.2rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0 0 .45rem; }
th, td { text-align: left; vertical-align: top; padding: .42rem .9rem .42rem 0; border-bottom: 1px solid
  var(--line); }
th { font-weight: 600; color: var(--soft); font-size: .82rem; border-bottom-width: 2px; vertical-align:
  bottom; }
th:last-child, td:last-child { padding-right: 0; }
.num { text-align: right; white-space: nowrap; }
td a { color: inherit; }
th, td.verdict { white-space: nowrap; } td { word-break: keep-all; }
tr.good .verdict { color: var(--good); } tr.bad .verdict { color: var(--bad); }
tr.open .verdict { color: var(--open); }
tr:target td { background: color-mix(in srgb, var(--link) 14%, transparent); }
figure { margin: 1.6rem 0 2rem; }
figure svg { display: block; width: 100%; max-width: 46rem; height: auto; font-family: inherit; }
figcaption { font-size: .85rem; color: var(--soft); margin-top: .5rem; max-width: 44rem; }
details { margin: .4rem 0 1.4rem; }
summary { cursor: pointer; color: var(--soft); font-size: .9rem; }
details[open] > summary { margin-bottom: .5rem; }
ul { padding-left: 1.2rem; margin: .4rem 0 1rem; } li { margin: .3rem 0; max-width: 46rem; }
@media (max-width: 40rem) { body { padding: 1.4rem 1rem 4rem; } .lead { font-size: 1.08rem; }
  h2 { margin-top: 2.4rem; } table { font-size: .82rem; } }
@media print { :root { --ink: #000; --soft: #444; --paper: #fff; --panel: #f4f4f4; --line: #bbb; --link: #000;
  --good: #000; --bad: #000; --open: #000; } body { max-width: none; padding: 0; font-size: 10pt; }
  nav, details { display: none; } a { text-decoration: none; color: inherit; } .scroll { overflow: visible; }
  table { font-size: 8.5pt; } h2 { break-after: avoid; } figure, .card, tr { break-inside: avoid; } }
"""
