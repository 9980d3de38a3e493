// CKA of all layers: the value at the pointer, or where the arrow keys are.
{
  class Matrix {
    constructor(figure) {
      Object.assign(this, JSON.parse(figure.querySelector(".numbers").textContent));
      this.svg = figure.querySelector("svg");
      this.cell = figure.querySelector(".cell");
      this.output = figure.querySelector(".reading");
      this.clear();
      this.svg.addEventListener("pointermove", (event) => this.onPointer(event));
      this.svg.addEventListener("keydown", (event) => this.onKey(event));
      this.svg.addEventListener("pointerleave", () => this.clear());
      this.svg.addEventListener("blur", () => this.clear());
    }

    onPointer(event) {
      const box = this.svg.getBoundingClientRect();
      const row = ((event.clientY - box.top) / box.height) * this.a.length;
      this.read(Math.floor(row), Math.floor(((event.clientX - box.left) / box.width) * this.b.length));
    }

    onKey(event) {
      const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      const step = steps[event.key];
      if (!step) return;
      event.preventDefault();
      if (this.row === null) this.read(0, 0);
      else this.read(this.row + step[0], this.column + step[1]);
    }

    // Say the value of a row and a column.
    read(row, column) {
      const inside = (at, names) => Math.min(names.length - 1, Math.max(0, at));
      [this.row, this.column] = [inside(row, this.a), inside(column, this.b)];
      this.cell.setAttribute("x", this.column);
      this.cell.setAttribute("y", this.row);
      this.cell.setAttribute("visibility", "visible");
      const value = this.values[this.row][this.column];
      this.output.textContent = `A ${this.a[this.row]}, B ${this.b[this.column]}: ${value ?? "no value"}`;
    }

    clear() {
      this.row = this.column = null;
      this.cell.setAttribute("visibility", "hidden");
      this.output.textContent = "";
    }
  }

  addEventListener("DOMContentLoaded", () => document.querySelectorAll(".matrix").forEach((figure) => new Matrix(figure)));
}
