// Curves: the values at the pointer, or where the arrow keys are.
{
  const WIDTH = 600;
  const HEIGHT = 160;
  const MOST = 8; // lines whose values are all said; of more the nearest one is

  const textOf = (value) => {
    if (typeof value !== "number") return value ?? "no value";
    return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(6)));
  };

  class Chart {
    constructor(figure) {
      Object.assign(this, JSON.parse(figure.querySelector(".numbers").textContent));
      this.svg = figure.querySelector(".curves");
      this.paths = [...this.svg.querySelectorAll(".line")];
      this.cursor = this.svg.querySelector(".cursor");
      this.output = figure.querySelector(".reading");
      this.xs = [...new Set(this.lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
      this.at = -1;
      this.svg.addEventListener("pointermove", (event) => this.onPointer(event));
      this.svg.addEventListener("keydown", (event) => this.onKey(event));
      this.svg.addEventListener("pointerleave", () => this.clear());
      this.svg.addEventListener("blur", () => this.clear());
    }

    // Where a value stands in the drawing.
    x(x) {
      const [left, right] = this.span;
      return right > left ? ((x - left) / (right - left)) * WIDTH : WIDTH / 2;
    }

    y(y) {
      const scaled = (value) => (this.log ? Math.log10(value) : value);
      const [low, high] = this.limits.map(scaled);
      return HEIGHT * (1 - (scaled(y) - low) / (high - low));
    }

    onPointer(event) {
      const box = this.svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * WIDTH;
      const y = ((event.clientY - box.top) / box.height) * HEIGHT;
      const far = this.xs.map((value) => Math.abs(this.x(value) - x));
      this.read(far.indexOf(Math.min(...far)), y);
    }

    onKey(event) {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.read(Math.min(this.xs.length - 1, Math.max(0, this.at + step)), null);
    }

    // Say the values at a place of the axis: of all lines, or of the line nearest to `y`.
    read(at, y) {
      this.at = at;
      const x = this.xs[at];
      const values = this.lines.map((line) => {
        const place = line.xs.indexOf(x);
        return place < 0 ? null : line.ys[place];
      });
      const far = values.map((value) => (typeof value === "number" ? Math.abs(this.y(value) - y) : Infinity));
      const nearest = y === null ? -1 : far.indexOf(Math.min(...far));
      const chosen = this.lines.length <= MOST ? [...values.keys()] : [Math.max(nearest, 0)];
      this.paths.forEach((path, line) => path.classList.toggle("near", line === nearest));
      this.cursor.setAttribute("d", `M${this.x(x)} 0V${HEIGHT}`);
      const said = chosen.map((line) => `${this.lines.length > 1 ? this.lines[line].name + " " : ""}${textOf(values[line])}`);
      this.output.textContent = `${this.x_name} ${textOf(x)}: ${said.join(", ")}`;
    }

    clear() {
      this.at = -1;
      this.cursor.setAttribute("d", "");
      this.output.textContent = "";
      for (const path of this.paths) path.classList.remove("near");
    }
  }

  addEventListener("DOMContentLoaded", () => {
    for (const figure of document.querySelectorAll(".chart")) {
      if (figure.querySelector(".plot")) new Chart(figure);
    }
  });
}
