"""The panel's looks: one style sheet for light and dark, for the live panel and for its record.

Greys are translucent and text inherits its colour, so that any theme's background will do. Where
a front end takes the sheet away, as GitHub does, what is left are plain tables and lists.
"""

from __future__ import annotations

from nbddp.ui.panel.loghtml import HEIGHT
from nbddp.ui.panel.theme import BAD, BUSY, OK, RULES, WARN

SHEET = f"""<style>
{RULES}
.nbddp {{ font-family: var(--jp-ui-font-family, system-ui, sans-serif); font-size: 13px;
  line-height: 1.45; color: inherit; overflow-x: auto; }}
.nbddp .widget-html-content, .nbddp.widget-html > .widget-html-content {{ line-height: 1.45; }}
.jp-OutputArea:has(.nbddp) .jp-OutputArea-child:has(.nbddp-fallback),
.output:has(.nbddp) .output_area:has(.nbddp-fallback),
.jp-OutputArea-child:has(.nbddp-soon) ~ .jp-OutputArea-child:has(.nbddp),
.output_area:has(.nbddp-soon) ~ .output_area:has(.nbddp) {{ display: none; }}
.jp-OutputArea-child:has(.nbddp)
  ~ .jp-OutputArea-child:has(> .jupyter-widgets):not(:has(> .jupyter-widgets > *)) {{
  display: none; }}
.nbddp-aftermath, .nbddp-buttons, .nbddp-choice {{ flex-wrap: wrap; align-items: center;
  overflow: visible; }}
.nbddp-muted {{ opacity: .78; }}
.nbddp-state {{ font-weight: 600; }}
.nbddp-dot {{ display: inline-block; width: .6em; height: .6em; border-radius: 50%;
  margin-right: .45em; background: {BUSY} !important; }}
.nbddp-dot.nbddp-ok {{ background: {OK} !important; }}
.nbddp-dot.nbddp-bad {{ background: {BAD} !important; }}
.nbddp-dot.nbddp-warn {{ background: {WARN} !important; }}
.nbddp-dot.nbddp-off {{ background: #8888 !important; }}
.nbddp-running .nbddp-dot {{ animation: nbddp-pulse 1.6s ease-in-out infinite; }}
.nbddp-late {{ max-height: 0; overflow: hidden; visibility: hidden;
  animation: nbddp-come 0s 5s forwards; }}
@keyframes nbddp-come {{ to {{ max-height: 4em; visibility: visible; }} }}
@keyframes nbddp-pulse {{ 50% {{ opacity: .35; }} }}
.nbddp table.nbddp-ranks {{ border-collapse: collapse; border: none; margin: 4px 0; width: auto;
  font-size: 12px; font-variant-numeric: tabular-nums; table-layout: auto; color: inherit; }}
.nbddp table.nbddp-ranks th {{ text-align: left; font-weight: 500; opacity: .78;
  padding: 1px 9px 1px 0; border: none; background: none; white-space: nowrap; }}
.nbddp table.nbddp-ranks td {{ text-align: left; padding: 1px 9px 1px 0; border: none;
  border-top: 1px solid #8883; background: none; white-space: nowrap; max-width: 26em;
  overflow: hidden; text-overflow: ellipsis; vertical-align: middle; }}
.nbddp table.nbddp-ranks tr, .nbddp table.nbddp-ranks tr:hover {{ background: none; }}
.nbddp table.nbddp-ranks code {{ font-size: 12px; background: none; color: inherit; padding: 0;
  font-family: var(--jp-code-font-family, monospace); opacity: .85; white-space: nowrap; }}
.nbddp-wrong {{ color: {BAD} !important; }}
.nbddp-waits {{ color: {WARN} !important; }}
.nbddp-add {{ color: {OK}; }}
.nbddp-del {{ color: {BAD}; }}
.nbddp-code {{ display: inline-block; max-width: 7em; overflow: hidden;
  text-overflow: ellipsis; vertical-align: bottom; }}
.nbddp-chip {{ font-weight: 600; }}
.nbddp-bar {{ display: inline-block; width: 30px; height: 6px; border-radius: 3px;
  background: #8883; margin-right: .6em; vertical-align: middle; overflow: hidden; }}
.nbddp-bar > span {{ display: block; height: 100%; border-radius: 3px; }}
.nbddp-grid {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(56px, 1fr));
  gap: 2px 6px; font-size: 11px; margin: 4px 0; font-variant-numeric: tabular-nums; }}
.nbddp-grid-of {{ display: grid; grid-template-columns: 11em 1fr; font-size: 11px; }}
.nbddp-grid-of > span {{ margin-top: 3px; overflow: hidden; text-overflow: ellipsis; }}
.nbddp-field .nbddp-bar {{ display: block; width: auto; height: 4px; margin: 0; }}
.nbddp-panel .nbddp-all.nbddp-all {{ width: auto; align-self: flex-start;
  height: 22px; line-height: 22px; font-size: 11px; }}
.nbddp-card {{ border-left: 3px solid {WARN}; background: #d9822b1c; padding: 5px 10px;
  margin: 5px 0; border-radius: 3px; }}
.nbddp-card.nbddp-error {{ border-color: {BAD}; background: #d8343417; }}
.nbddp pre, .nbddp .jp-RenderedText pre {{ font-size: 12px; line-height: 1.4;
  font-family: var(--jp-code-font-family, monospace); margin: 0; padding: 0 !important;
  background: none !important; color: inherit; border: none;
  white-space: pre-wrap; overflow-wrap: anywhere; word-break: normal; }}
.nbddp .jp-RenderedText {{ padding: 4px 0; background: none; text-align: left; }}
.nbddp-time {{ display: none; opacity: .78; }}
.nbddp-timed .nbddp-time {{ display: inline; }}
.nbddp-said {{ opacity: .8; font-style: italic; }}
.nbddp-earlier {{ opacity: .78; }}
.nbddp-line {{ position: relative; height: 14px; margin: 4px 6px 0; max-width: 720px; }}
.nbddp-line::before {{ content: ""; position: absolute; left: 0; right: 0; top: 6px;
  border-top: 1px solid #8886; }}
.nbddp-line > span {{ position: absolute; top: 2px; width: 9px; height: 9px; margin-left: -4px;
  border-radius: 50%; background: {BUSY}; }}
.nbddp-line > span.nbddp-bad {{ background: {BAD}; }}
.nbddp-line > span.nbddp-warn {{ background: {WARN}; }}
.nbddp ul.nbddp-events {{ list-style: none; margin: 0; padding: 0; font-size: 12px; }}
.nbddp ul.nbddp-events li {{ margin: 0; }}
.nbddp-at {{ display: inline-block; min-width: 4.5em; opacity: .78;
  font-variant-numeric: tabular-nums; }}
.nbddp details > summary {{ cursor: pointer; }}
.nbddp .nbddp-charts {{ display: flex; flex-wrap: wrap; }}
.nbddp-panel {{ border: 1px solid #8884; border-radius: 5px; padding: 6px 10px 8px;
  overflow: hidden; overflow: clip; }}
.jp-CodeCell:not(.jp-mod-outputsScrolled) .jp-OutputArea:has(.nbddp-head),
.jp-OutputArea-child:has(.nbddp-head), .jp-OutputArea-output:has(.nbddp-head) {{
  overflow: clip; min-width: 0; }}
.nbddp-panel {{ max-width: 100%; box-sizing: border-box; }}
.nbddp-panel .jupyter-widgets-disconnected::before {{ display: none !important; }}
.nbddp-panel.jupyter-widgets-disconnected::before {{
  content: "the kernel has ended: this is the last state of the panel";
  display: block !important; background: none !important; width: auto !important;
  height: auto !important; padding: 2px 0; font-weight: 600; color: {BAD}; }}
.nbddp-panel.jupyter-widgets-disconnected .nbddp-dot {{ animation: none;
  background: #888 !important; }}
.nbddp-ranks svg {{ vertical-align: middle; }}
.nbddp-ranks img {{ display: none !important; }}
.nbddp-panel .jupyter-button {{ height: 26px; line-height: 26px; font-size: 12px;
  border-radius: 3px; }}
.nbddp-head {{ flex-wrap: wrap; align-items: center; justify-content: space-between;
  gap: 0 12px; overflow: visible; background: var(--jp-layout-color0, Canvas); }}
.nbddp-panel > .nbddp-head {{ position: sticky; top: 0; z-index: 3; }}
.nbddp-panel .nbddp-asks {{ font-weight: 600; outline: 2px solid {WARN};
  outline-offset: -2px; }}
.nbddp-head > .widget-html {{ flex: 1 1 auto; }}
.nbddp-buttons {{ flex: 0 1 auto; }}
.nbddp-scroll {{ max-height: {HEIGHT}px; overflow-y: auto; display: flex;
  flex-direction: column-reverse; border-top: 1px solid #8883; }}
.nbddp-scroll > *, .nbddp-kept > * {{ flex: 0 0 auto; overflow: visible; }}
.nbddp-scroll .widget-box {{ overflow: visible; }}
.nbddp-html.nbddp-html {{ margin: 0; }}
.nbddp-scroll .nbddp-html {{ overflow: visible; flex: 0 0 auto; }}
.nbddp-scroll .nbddp .jp-RenderedText {{ padding: 0; }}
.nbddp-choice > * {{ margin: 2px 2px 2px 0; }}
.nbddp-panel .widget-html-content {{ overflow-x: auto; }}
.nbddp-choice .widget-text {{ height: 24px; }}
.nbddp-choice .widget-text input {{ height: 22px; padding: 0 6px; font-size: 11px; }}
.nbddp-choice .widget-toggle-button, .nbddp-choice .jupyter-button {{ height: 22px;
  line-height: 22px; padding: 0 8px; font-size: 11px; width: auto; }}
@media print {{ .nbddp-kept, .nbddp-card {{ max-height: none !important; }} }}
</style>"""
