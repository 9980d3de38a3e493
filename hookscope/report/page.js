"use strict";

// The one global: what the scripts of a page share.
const hookscope = {};

// With this class the style sheet hides what only scripts show. It is set before the page is drawn.
document.documentElement.classList.add("js");

// Where the reader is: the page, or the view of a layer.
{
  // The hash as numbers, such as "#layer=3&channel=17&image=0"; null where it has none.
  hookscope.readHash = () => {
    const fields = new URLSearchParams(location.hash.slice(1));
    const number = (name) => (/^\d+$/.test(fields.get(name) ?? "") ? Number(fields.get(name)) : null);
    return { layer: number("layer"), channel: number("channel"), image: number("image") };
  };

  const hashOf = (place) => {
    const fields = ["layer", "channel", "image"].filter((name) => place[name] != null);
    return "#" + fields.map((name) => `${name}=${place[name]}`).join("&");
  };

  // Go there. With `replace`, the browser's way back does not stop at where the reader was.
  hookscope.go = (place, { replace = false } = {}) => {
    if (replace) history.replaceState(null, "", hashOf(place));
    else history.pushState(null, "", hashOf(place));
    show();
  };

  // Say something to readers who listen.
  hookscope.announce = (text) => {
    document.getElementById("status").textContent = text;
  };

  const layers = () => [...document.querySelectorAll("section.layer")];
  const title = document.title;
  let before = null; // what had the focus on the page, and where it was scrolled to

  // Show what the hash names.
  const show = () => {
    const place = hookscope.readHash();
    const wasOpen = document.querySelector("section.layer.open");
    const opened = layers().find((section) => Number(section.dataset.layer) === place.layer);
    if (opened && !wasOpen) before = { focus: document.activeElement, top: scrollY };
    document.body.classList.toggle("layer-open", Boolean(opened));
    wasOpen?.classList.toggle("open", wasOpen === opened);
    if (opened) openSection(opened, place, opened !== wasOpen);
    else if (wasOpen) goBack();
  };

  const openSection = (section, place, isNew) => {
    section.classList.add("open");
    const heading = section.querySelector("h2");
    document.title = `${heading.textContent} · ${document.querySelector("h1").textContent}`;
    hookscope.openLayer(place.layer, place);
    if (!isNew) return;
    scrollTo(0, 0);
    heading.focus({ preventScroll: true });
  };

  const goBack = () => {
    document.title = title;
    before?.focus?.focus({ preventScroll: true });
    scrollTo({ top: before?.top ?? 0, behavior: "instant" });
  };

  // The view of the next layer (`step` 1), or of the one before (-1).
  hookscope.step = (step) => {
    const all = layers();
    const at = all.findIndex((section) => section.classList.contains("open"));
    const next = all[at + step];
    if (next) hookscope.go({ layer: next.dataset.layer, image: hookscope.readHash().image }, { replace: true });
  };

  hookscope.closeLayer = () => hookscope.go({});

  // A link to a layer also names the channel and the image, which a page without scripts cannot show.
  const completeLinks = () => {
    for (const link of document.querySelectorAll("a[data-channel], a[data-image]")) {
      const layer = new URLSearchParams(link.hash.slice(1)).get("layer");
      if (layer !== null) link.hash = hashOf({ layer, ...link.dataset });
    }
  };

  addEventListener("hashchange", show);
  addEventListener("popstate", show);
  addEventListener("DOMContentLoaded", () => {
    completeLinks();
    show();
  });
}

// The network as a list: fold, filter, sort, and move in it.
{
  // A row, with what the list must know of it.
  const rowOf = (element) => ({
    element,
    parents: element.dataset.parents.split(" ").filter(Boolean).map(Number),
    isModule: element.classList.contains("module"),
    isOpen: "open" in element.dataset,
    button: element.querySelector(".fold"),
    link: element.querySelector("th a"),
    text: `${element.cells[1].textContent} ${element.cells[2].textContent}`.toLowerCase(),
    values: [...element.cells].map((cell) => valueOf(cell.dataset.value)),
  });

  const valueOf = (text) => (text === "" ? null : Number.isNaN(Number(text)) ? text : Number(text));

  // Numbers before texts, rows without a value last in either direction.
  const compare = (a, b, direction) => {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return direction * (typeof a === "number" ? a - b : a.localeCompare(b));
  };

  class CallList {
    constructor(table) {
      this.table = table;
      this.rows = [...table.tBodies[0].rows].map(rowOf);
      this.heads = [...table.tHead.rows[0].cells];
      this.filter = document.getElementById("filter");
      this.column = 0; // the order of execution: then modules are shown, and can be folded
      this.direction = 1;
      this.current = null;
      this.heads.forEach((head, column) => this.makeSortable(head, column));
      this.filter.addEventListener("input", () => this.show());
      document.getElementById("unfold").addEventListener("click", () => this.unfoldAll());
      table.tBodies[0].addEventListener("click", (event) => this.onClick(event));
      for (const row of this.rows) row.element.tabIndex = -1;
      this.show();
    }

    get inOrder() {
      return this.column === 0 && this.direction === 1;
    }

    makeSortable(head, column) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      head.setAttribute("aria-sort", column === 0 ? "ascending" : "none");
      button.addEventListener("click", () => this.sort(column));
    }

    // Numbers begin with the largest, texts and the order of execution with the first.
    sort(column) {
      const isNumber = this.rows.some((row) => typeof row.values[column] === "number");
      const first = column > 0 && isNumber ? -1 : 1;
      this.direction = column === this.column ? -this.direction : first;
      this.column = column;
      this.heads.forEach((head, at) => {
        const word = this.direction === 1 ? "ascending" : "descending";
        head.setAttribute("aria-sort", at === column ? word : "none");
      });
      const sorted = [...this.rows].sort((a, b) => compare(a.values[column], b.values[column], this.direction));
      this.table.tBodies[0].append(...sorted.map((row) => row.element));
      this.ordered = sorted;
      this.show();
      hookscope.announce(`sorted by ${this.heads[column].textContent}, ${this.direction === 1 ? "ascending" : "descending"}`);
    }

    // Show the rows that the filter, the order and the folded modules leave.
    show() {
      const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      this.table.classList.toggle("sorted", !this.inOrder);
      let calls = 0;
      for (const row of this.rows) {
        const isShown = this.isShown(row, words);
        row.element.hidden = !isShown;
        if (isShown && !row.isModule) calls += 1;
        row.button?.setAttribute("aria-expanded", String(row.isOpen || words.length > 0));
      }
      const all = this.rows.filter((row) => !row.isModule).length;
      document.getElementById("shown").textContent = `${calls} of ${all} calls shown`;
      const isFolded = this.rows.some((row) => row.isModule && !row.isOpen);
      document.getElementById("unfold").textContent = isFolded ? "Unfold all" : "Fold all";
    }

    isShown(row, words) {
      if (!this.inOrder && row.isModule) return false;
      if (words.length) return words.every((word) => row.text.includes(word));
      return !this.inOrder || row.parents.every((parent) => this.rows[parent].isOpen);
    }

    fold(row, isOpen = !row.isOpen) {
      row.isOpen = isOpen;
      this.show();
    }

    unfoldAll() {
      const isOpen = this.rows.some((row) => row.isModule && !row.isOpen);
      for (const row of this.rows) row.isOpen = isOpen;
      this.show();
    }

    onClick(event) {
      const row = this.rows.find((candidate) => candidate.element === event.target.closest("tr"));
      this.current = row;
      if (event.target.closest(".fold")) this.fold(row);
    }

    get visible() {
      return (this.ordered ?? this.rows).filter((row) => !row.element.hidden);
    }

    // Give the focus to the next row (`step` 1), or to the one before (-1).
    move(step) {
      const rows = this.visible;
      const at = rows.indexOf(this.current);
      const next = rows[at < 0 ? (step > 0 ? 0 : rows.length - 1) : at + step];
      if (!next) return;
      this.current = next;
      next.element.focus();
    }

    enter() {
      if (this.current?.link) this.current.link.click();
      else if (this.current?.isModule) this.fold(this.current);
    }

    // Fold the module of the current row, or the one that it is in.
    foldCurrent() {
      const row = this.current;
      if (!row || !this.inOrder) return;
      const module = row.isModule && row.isOpen ? row : this.rows[row.parents.at(-1)];
      if (!module) return;
      this.fold(module, false);
      this.current = module;
      module.element.focus();
    }

    unfoldCurrent() {
      if (this.current?.isModule) this.fold(this.current, true);
    }

    clear() {
      this.filter.value = "";
      this.show();
    }
  }

  addEventListener("DOMContentLoaded", () => {
    const table = document.getElementById("calls");
    if (table) hookscope.list = new CallList(table);
  });
}

// The keyboard.
{
  const isOpen = () => document.body.classList.contains("layer-open");
  const step = (by) => () => (isOpen() ? hookscope.step(by) : hookscope.list?.move(by));

  const KEYS = {
    j: step(1),
    k: step(-1),
    h: () => isOpen() || hookscope.list?.foldCurrent(),
    l: () => isOpen() || hookscope.list?.unfoldCurrent(),
    "/": () => goToFilter(),
    "?": () => document.getElementById("keys").showModal(),
    Escape: () => isOpen() && hookscope.closeLayer(),
  };

  const goToFilter = () => {
    if (isOpen()) hookscope.closeLayer();
    document.getElementById("filter")?.focus();
  };

  const inFilter = (event) => {
    if (event.key === "Escape") hookscope.list.clear();
    if (event.key !== "Escape" && event.key !== "Enter") return;
    event.target.blur();
    hookscope.list.current = null;
    hookscope.list.move(1);
    event.preventDefault();
  };

  const onKey = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.id === "filter") inFilter(event);
    if (event.target.closest("input, select, textarea")) return;
    if (event.key === "Enter" && event.target.matches("#calls tbody tr")) return void hookscope.list.enter();
    if (!Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  };

  addEventListener("keydown", onKey);
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("show-keys")?.addEventListener("click", KEYS["?"]);
  });
}
