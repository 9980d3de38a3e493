// The network as a graph: zoomed and moved by mouse, fingers and keyboard, with more or fewer blocks.
{
  const STEP = 1.25; // of one zoom
  const MOVE = 60; // pixels of one arrow key
  const CLICK = 4; // pixels that a pointer may move in a click

  class Graph {
    constructor(frame) {
      this.frame = frame;
      this.picture = frame.querySelector("svg");
      this.whole = this.picture.viewBox.baseVal;
      this.size = { width: this.whole.width, height: this.whole.height };
      this.drag = null;
      this.picture.removeAttribute("width");
      this.picture.removeAttribute("height");
      this.picture.setAttribute("preserveAspectRatio", "xMidYMin");
      frame.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
      frame.addEventListener("pointerdown", (event) => this.onDown(event));
      frame.addEventListener("pointermove", (event) => this.onMove(event));
      for (const end of ["pointerup", "pointercancel"]) frame.addEventListener(end, () => (this.drag = null));
      frame.addEventListener("click", (event) => this.onClick(event), { capture: true });
      frame.addEventListener("keydown", (event) => this.onKey(event));
      frame.addEventListener("dragstart", (event) => event.preventDefault());
    }

    // Pixels of the screen for one unit of the drawing.
    get scale() {
      return this.picture.getScreenCTM().a;
    }

    // The upper part in a size that can be read, or all if it is small.
    start() {
      const { clientWidth: width, clientHeight: height } = this.frame;
      const scale = Math.min(1, width / this.size.width);
      const shown = { width: width / scale, height: height / scale };
      this.show((this.size.width - shown.width) / 2, 0, shown.width, shown.height);
    }

    all() {
      this.show(0, 0, this.size.width, this.size.height);
    }

    show(x, y, width, height) {
      this.view = { x, y, width, height };
      this.picture.setAttribute("viewBox", `${x} ${y} ${width} ${height}`);
    }

    move(x, y) {
      const { view, scale } = this;
      this.show(view.x + x / scale, view.y + y / scale, view.width, view.height);
    }

    // Zoom so that the point of the screen stays where it is; without one, the middle stays.
    zoom(factor, point) {
      const width = this.view.width / factor;
      if (width < 40 || width > 20 * Math.max(this.size.width, this.size.height)) return;
      const box = this.frame.getBoundingClientRect();
      const at = point ?? { x: box.x + box.width / 2, y: box.y + box.height / 2 };
      const inverse = this.picture.getScreenCTM().inverse();
      const place = new DOMPoint(at.x, at.y).matrixTransform(inverse);
      const { view } = this;
      const x = place.x - (place.x - view.x) / factor;
      const y = place.y - (place.y - view.y) / factor;
      this.show(x, y, width, view.height / factor);
    }

    // The wheel scrolls the page until the reader works with the graph.
    onWheel(event) {
      if (!event.ctrlKey && !this.frame.contains(document.activeElement)) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? STEP : 1 / STEP, event);
    }

    onDown(event) {
      if (event.button === 0) this.drag = { x: event.clientX, y: event.clientY, far: 0 };
      this.moved = false;
    }

    onMove(event) {
      if (!this.drag || !event.buttons) return;
      const [x, y] = [event.clientX - this.drag.x, event.clientY - this.drag.y];
      const far = this.drag.far + Math.hypot(x, y);
      if (far > CLICK && !this.moved) this.frame.setPointerCapture(event.pointerId);
      this.moved = far > CLICK;
      this.move(-x, -y);
      this.drag = { x: event.clientX, y: event.clientY, far };
    }

    // A click that ends a drag follows no link.
    onClick(event) {
      if (!this.moved) return;
      event.preventDefault();
      event.stopPropagation();
      this.moved = false;
    }

    onKey(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const actions = {
        "+": () => this.zoom(STEP),
        "=": () => this.zoom(STEP),
        "-": () => this.zoom(1 / STEP),
        0: () => this.all(),
        ArrowLeft: () => this.move(-MOVE, 0),
        ArrowRight: () => this.move(MOVE, 0),
        ArrowUp: () => this.move(0, -MOVE),
        ArrowDown: () => this.move(0, MOVE),
      };
      if (!Object.hasOwn(actions, event.key)) return;
      event.preventDefault();
      actions[event.key]();
    }
  }

  addEventListener("DOMContentLoaded", () => {
    const section = document.getElementById("graph");
    if (!section) return;
    const graphs = [...section.querySelectorAll(".graph-frame")].map((frame) => new Graph(frame));
    let shown = graphs.findIndex((graph) => !graph.frame.hidden);
    const button = (name, action) => section.querySelector(`[data-action="${name}"]`).addEventListener("click", action);
    const open = (next) => {
      if (!graphs[next]) return;
      shown = next;
      graphs.forEach((graph, at) => (graph.frame.hidden = at !== shown));
      section.querySelector(".shown").textContent = graphs[shown].frame.dataset.words;
      if (!graphs[shown].view) graphs[shown].start();
      section.querySelector('[data-action="fewer"]').disabled = !graphs[shown - 1];
      section.querySelector('[data-action="more"]').disabled = !graphs[shown + 1];
    };
    button("in", () => graphs[shown].zoom(STEP));
    button("out", () => graphs[shown].zoom(1 / STEP));
    button("all", () => graphs[shown].all());
    button("fewer", () => open(shown - 1));
    button("more", () => open(shown + 1));
    section.classList.add("zooms");
    open(shown);
  });
}
