// The numbers under the pointer.

import { el, fill } from "./dom.js";

export class Tip {
  constructor() {
    this.node = el("div", { class: "tip", "aria-hidden": "true", hidden: true });
    document.body.append(this.node);
  }

  show(found, stage, x, y) {
    if (!found) {
      this.hide();
      return;
    }
    const line = ({ label, value, colour }) =>
      el("li", {}, colour ? el("span", { class: "chip", style: { background: colour } }) : null, el("span", {}, label), el("b", {}, value));
    fill(this.node, el("p", {}, found.title), el("ul", {}, found.rows.map(line)));
    this.node.hidden = false;
    const box = stage.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.node;
    const wanted = box.left + x + 16 + width > innerWidth - 8 ? box.left + x - 16 - width : box.left + x + 16;
    const top = Math.max(8, Math.min(innerHeight - height - 8, box.top + y - height / 2));
    this.node.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, wanted))}px`;
    this.node.style.top = `${top}px`;
  }

  hide() {
    this.node.hidden = true;
  }
}
