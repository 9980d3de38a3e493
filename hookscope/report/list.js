// A table whose rows are folded by module, filtered and sorted: the network as a list.
{
  // A row, with what the list must know of it.
  const rowOf = (element) => ({
    element,
    parents: element.dataset.parents.split(" ").filter(Boolean).map(Number),
    isModule: element.classList.contains("module"),
    isCall: "call" in element.dataset,
    isOpen: "open" in element.dataset,
    button: element.querySelector(".fold"),
    link: element.querySelector("th a"),
    text: `${element.cells[1].textContent} ${element.cells[2].textContent}`.toLowerCase(),
    values: [...element.cells].map((cell) => valueOf(cell.dataset.value)),
  });

  const valueOf = (text) => (text === "" ? null : Number.isNaN(Number(text)) ? text : Number(text));

  // Numbers before texts, and rows without a value last in either direction.
  const compare = (a, b, direction) => {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return direction * (typeof a === "number" ? a - b : collator.compare(a, b));
  };

  const collator = new Intl.Collator("en", { numeric: true });

  const AT_ONCE = 60; // rows that are laid out before the next frame; the others follow frame by frame

  class List {
    constructor(table) {
      this.table = table;
      this.body = table.tBodies[0];
      this.rows = [...this.body.rows].map(rowOf); // in order of execution: their numbers are their positions
      this.sorted = this.rows;
      this.heads = [...table.tHead.rows[0].cells];
      const part = table.closest("section");
      this.filter = part.querySelector(".filter");
      this.unfold = part.querySelector(".unfold"); // null where there are no modules
      this.count = part.querySelector(".shown");
      this.column = 0; // sorted by the order of execution: then modules are shown, and can be folded
      this.direction = 1;
      this.current = null; // the row that the keyboard is at
      this.heads.forEach((head, column) => this.makeSortable(head, column));
      for (const row of this.rows) row.element.tabIndex = -1;
      this.filter.addEventListener("input", () => this.show());
      this.filter.addEventListener("keydown", (event) => this.leaveFilter(event));
      this.unfold?.addEventListener("click", () => this.foldAll(this.isFolded));
      part.addEventListener("focusin", () => (hookscope.list = this));
      this.body.addEventListener("click", (event) => this.onClick(event));
      this.show();
    }

    get isInOrder() {
      return this.column === 0 && this.direction === 1;
    }

    // Whether a module is folded.
    get isFolded() {
      return this.rows.some((row) => row.isModule && !row.isOpen);
    }

    makeSortable(head, column) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      head.setAttribute("aria-sort", column === 0 ? "ascending" : "none");
      button.addEventListener("click", () => this.sort(column));
    }

    // Sort by a column: numbers from the largest, texts and the order of execution from the first; then the other way.
    sort(column) {
      const isNumber = this.rows.some((row) => typeof row.values[column] === "number");
      const first = column > 0 && isNumber ? -1 : 1;
      this.sortBy(column, column === this.column ? -this.direction : first);
    }

    sortBy(column, direction) {
      this.column = column;
      this.direction = direction;
      this.sorted = [...this.rows].sort((a, b) => compare(a.values[column], b.values[column], this.direction));
      for (const row of this.rows) row.element.hidden = true;
      this.body.append(...this.sorted.map((row) => row.element));
      const word = this.direction === 1 ? "ascending" : "descending";
      this.heads.forEach((head, at) => head.setAttribute("aria-sort", at === column ? word : "none"));
      this.show();
      hookscope.announce(`Sorted by ${this.heads[column].textContent}, ${word}`);
    }

    // Show the rows that filter, order and folded modules leave.
    show() {
      const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      this.table.classList.toggle("sorted", !this.isInOrder);
      for (const row of this.rows) {
        row.isShown = this.isShown(row, words);
        if (!row.isShown) row.element.hidden = true;
        row.button?.setAttribute("aria-expanded", String(row.isOpen));
      }
      this.layOut();
      const calls = this.rows.filter((row) => row.isCall);
      const shown = calls.filter((row) => row.isShown).length;
      this.count.textContent = `${shown} of ${calls.length} ${this.table.dataset.rows ?? "calls"}`;
      if (this.unfold) this.unfold.textContent = this.isFolded ? "Unfold all" : "Fold all";
    }

    // A thousand rows at once would keep the reader waiting.
    layOut() {
      cancelAnimationFrame(this.frame);
      const rows = this.sorted.filter((row) => row.isShown && row.element.hidden);
      for (const row of rows.slice(0, AT_ONCE)) row.element.hidden = false;
      if (rows.length > AT_ONCE) this.frame = requestAnimationFrame(() => setTimeout(() => this.layOut()));
    }

    isShown(row, words) {
      if (!this.isInOrder && !row.isCall) return false;
      if (words.length) return words.every((word) => row.text.includes(word));
      return !this.isInOrder || row.parents.every((parent) => this.rows[parent].isOpen);
    }

    fold(row, isOpen) {
      row.isOpen = isOpen;
      this.show();
    }

    foldAll(isOpen) {
      for (const row of this.rows) row.isOpen = isOpen;
      this.show();
    }

    onClick(event) {
      const element = event.target.closest("tr");
      this.current = this.rows.find((row) => row.element === element);
      if (event.target.closest(".fold")) this.fold(this.current, !this.current.isOpen);
    }

    // Make a row the current one, in sight and with the focus.
    reveal(row) {
      for (const parent of row.parents) this.rows[parent].isOpen = true;
      this.show();
      if (!row.isShown) this.showAll();
      this.focus(row);
    }

    // Without a filter, in order of execution.
    showAll() {
      this.filter.value = "";
      this.sortBy(0, 1);
    }

    focus(row) {
      this.current = row;
      row.element.hidden = false;
      row.element.focus();
    }

    // Go to the next row (`step` 1), or to the one before (-1).
    move(step) {
      const rows = this.sorted.filter((row) => row.isShown);
      const at = rows.indexOf(this.current);
      const next = rows[at < 0 ? (step > 0 ? 0 : rows.length - 1) : at + step];
      if (next) this.focus(next);
    }

    // Open the layer of the current row; else fold or unfold it.
    enter() {
      if (this.current.link) this.current.link.click();
      else if (this.current.isModule) this.fold(this.current, !this.current.isOpen);
    }

    // Fold the module of the current row, or else the module that it is in.
    foldCurrent() {
      const row = this.current;
      if (!row || !this.isInOrder) return;
      const module = row.isModule && row.isOpen ? row : this.rows[row.parents.at(-1)];
      if (!module) return;
      this.fold(module, false);
      this.focus(module);
    }

    unfoldCurrent() {
      if (this.current?.isModule) this.fold(this.current, true);
    }

    // From the filter, Enter goes to the first row; Escape also shows all rows again.
    leaveFilter(event) {
      if (event.key !== "Escape" && event.key !== "Enter") return;
      event.preventDefault();
      if (event.key === "Escape") this.filter.value = "";
      this.show();
      this.current = null;
      this.move(1);
    }
  }

  // The row that the hash names, such as "#call=12".
  const revealNamed = () => {
    const number = new URLSearchParams(location.hash.slice(1)).get("call");
    const row = hookscope.list.rows[number];
    if (row) hookscope.list.reveal(row);
  };

  addEventListener("DOMContentLoaded", () => {
    const lists = [...document.querySelectorAll("table.calls")].map((table) => new List(table));
    if (!lists.length) return;
    hookscope.list = lists[0];
    addEventListener("hashchange", revealNamed);
    revealNamed();
  });
}
