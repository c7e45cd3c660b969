"""The style sheet of the HTML report: one page, light and dark, from 400 to 1280 pixels and beyond."""

CSS = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --edge: #e2e5ea; --ink: #1b2330; --soft: #5c6675; --faint: #8b94a3;
  --grid: #e9ecf1; --accent: #2563c9; --area: rgba(37, 99, 201, .09); --note: #a2561b;
  --good: #17753f; --good-back: #e2f4e9; --bad: #b3261e; --bad-back: #fbe6e4; --idle: #5c6675; --idle-back: #eceff3;
  --s0: #2563c9; --s1: #2a9d8f; --s2: #8d6cc4; --s3: #d98324; --s4: #c2496b; --s5: #6b7788;
  --s6: #7f9130; }
@media (prefers-color-scheme: dark) { :root {
  --page: #12161c; --card: #1a2029; --edge: #2b333f; --ink: #e6eaf0; --soft: #a3adbb; --faint: #7b8695;
  --grid: #27303b; --accent: #6ea3f7; --area: rgba(110, 163, 247, .13); --note: #e0a06a;
  --good: #7fd3a0; --good-back: #17352a; --bad: #f2a19a; --bad-back: #422322; --idle: #a3adbb; --idle-back: #262e39;
  --s0: #6ea3f7; --s1: #4fbfb0; --s2: #b094e0; --s3: #e6a254; --s4: #e07f9b; --s5: #93a0b2;
  --s6: #b5c75a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 40px; }
header { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 14px; margin-bottom: 20px; }
header p { flex-basis: 100%; margin: 0; color: var(--soft); }
h1 { font-size: 24px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; letter-spacing: -.01em; }
h2 { font-size: 16px; margin: 0 0 12px; }
section { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 18px 20px;
  margin-top: 16px; }
.muted { color: var(--soft); } .small { font-size: 13px; }
.pill { border-radius: 99px; padding: 1px 10px; font-size: 13px; font-weight: 600; white-space: nowrap;
  color: var(--idle); background: var(--idle-back); }
.pill.done, .pill.PASS { color: var(--good); background: var(--good-back); }
.pill.failed, .pill.HOLD { color: var(--bad); background: var(--bad-back); }
.error { margin: 0 0 16px; overflow-wrap: anywhere;
  border-color: var(--bad); background: var(--bad-back); color: var(--bad); }
.figures { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(156px, 1fr)); margin: 0; }
.figures > div { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 11px 14px; }
.figures dt { color: var(--soft); font-size: 13px; }
.figures dd { margin: 0; }
.figures .value { font-size: 23px; line-height: 1.3; font-weight: 600; font-variant-numeric: tabular-nums;
  letter-spacing: -.015em; white-space: nowrap; }
.figures .under { color: var(--faint); font-size: 12.5px; line-height: 1.35; }
.plots { display: grid; gap: 22px 26px; grid-template-columns: repeat(auto-fit, minmax(310px, 1fr)); }
.plots > div { min-width: 0; }
figure { margin: 0; min-width: 0; max-width: 520px; }
figcaption { font-weight: 600; font-size: 14px; }
figcaption span { font-weight: 400; color: var(--soft); }
svg.plot { display: block; width: 100%; height: auto; margin-top: 6px; }
.plot text { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
.plot text.title { fill: var(--faint); }
.plot text.note { fill: var(--note); paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.plot path { fill: none; } .plot .grid { stroke: var(--grid); } .plot .axis, .plot .tick { stroke: var(--faint); }
.plot .curve { stroke: var(--accent); stroke-width: 1.8; stroke-linejoin: round; }
.plot .area { fill: var(--area); } .plot .dot { fill: var(--accent); } .plot .whisker { stroke: var(--accent);
  opacity: .5; }
.plot .reference { stroke: var(--note); stroke-dasharray: 4 3; }
.plot .hover { fill: transparent; } .plot .hover:hover { fill: var(--accent); fill-opacity: .35; }
.plot .cell { fill: var(--accent); } .plot .cut { stroke: var(--ink); stroke-width: 1.2; }
.plot text.inside { fill: var(--card); font-size: 10px; font-weight: 600; }
svg.bar { display: block; width: 100%; height: 26px; border-radius: 6px; margin-bottom: 12px;
  background: var(--idle-back); }
.stacks { display: grid; grid-template-columns: max-content minmax(60px, 1fr) max-content; gap: 7px 12px;
  align-items: center; margin-top: 8px; font-size: 13px; }
.stacks .rank { color: var(--soft); }
svg.stack { display: block; width: 100%; height: 16px; border-radius: 4px; background: var(--idle-back); }
.stack .limit { fill: var(--note); }
.plot .fill { fill: inherit; } .plot rect.hover:hover { fill-opacity: .12; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 0 0 12px; }
td.word { white-space: nowrap; } td.why { min-width: 240px; font-size: 13px; color: var(--soft); }
a { color: var(--accent); }
svg.meter { display: inline-block; width: 56px; height: 8px; border-radius: 3px; margin-left: 8px;
  background: var(--grid); }
.meter rect { fill: var(--accent); }
.c0 { fill: var(--s0); } .c1 { fill: var(--s1); } .c2 { fill: var(--s2); } .c3 { fill: var(--s3); }
  .c4 { fill: var(--s4); }
.c5 { fill: var(--s5); } .c6 { fill: var(--s6); } .c7 { fill: var(--edge); }
svg.swatch { width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; vertical-align: -1px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; white-space: nowrap; }
th, td { padding: 4px 12px; border-bottom: 1px solid var(--grid); }
tr:last-child td { border-bottom: 0; } th:first-child, td:first-child { padding-left: 0; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code, pre { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
td code { color: var(--soft); white-space: nowrap; }
.facts { display: grid; gap: 2px 28px; grid-template-columns: repeat(auto-fit, minmax(290px, 1fr)); margin: 0; }
.facts div { display: flex; justify-content: space-between; gap: 16px; border-bottom: 1px solid var(--grid);
  padding: 5px 0; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; font-variant-numeric: tabular-nums; text-align: right; }
pre { margin: 0; padding: 14px 16px; overflow-x: auto; border-radius: 8px; background: var(--page); }
.columns { columns: 300px; column-gap: 26px; }
.columns pre { break-inside: avoid; margin-bottom: 12px; }
footer { color: var(--faint); font-size: 13px; margin-top: 18px; }
@media (max-width: 560px) { main { padding: 18px 12px 28px; } section { padding: 14px; }
  .figures { grid-template-columns: 1fr 1fr; gap: 8px; } .figures > div { padding: 10px 12px; }
  .figures .value { font-size: 20px; }
  th, td { padding: 4px 8px; } .plots { grid-template-columns: 1fr; } }
@media print { body { background: #fff; } section, .figures > div { break-inside: avoid; } }
"""
