"use strict";

// The one global: what the scripts of a page share.
const hookscope = {};

// With this class the style sheet hides what only scripts show. It is set before the page is drawn.
document.documentElement.classList.add("js");

// Where the reader is: at the page, or at the view of a layer.
{
  // The hash as numbers, such as "#layer=3&channel=17&image=0"; null where it has none.
  hookscope.readHash = (hash = location.hash) => {
    const fields = new URLSearchParams(hash.slice(1));
    const number = (name) => (/^\d+$/.test(fields.get(name) ?? "") ? Number(fields.get(name)) : null);
    return { layer: number("layer"), channel: number("channel"), image: number("image") };
  };

  const hashOf = (place) => {
    const fields = ["layer", "channel", "image"].filter((name) => place[name] != null);
    return "#" + fields.map((name) => `${name}=${place[name]}`).join("&");
  };

  // Go to a place. With `replace`, the browser's way back does not stop at the place before.
  hookscope.go = (place, { replace = false } = {}) => {
    if (replace) history.replaceState(null, "", hashOf(place));
    else history.pushState(null, "", hashOf(place));
    show();
  };

  // Tell screen readers something.
  hookscope.announce = (text) => {
    document.getElementById("status").textContent = text;
  };

  hookscope.openSection = () => document.querySelector("section.layer.open");

  const sections = () => [...document.querySelectorAll("section.layer")];
  let before = null; // the title, the focus and the scroll position of the page that a layer hides

  // Show what the hash names.
  const show = () => {
    const place = hookscope.readHash();
    const last = hookscope.openSection();
    const next = sections().find((section) => Number(section.dataset.layer) === place.layer);
    if (next && !last) before = { title: document.title, focus: document.activeElement, top: scrollY };
    if (next !== last) last?.classList.remove("open");
    document.body.classList.toggle("layer-open", next !== undefined);
    if (next) showLayer(next, place, next !== last);
    else if (last) showPage();
  };

  const showLayer = (section, place, isNew) => {
    section.classList.add("open");
    hookscope.openLayer(place.layer, place);
    if (!isNew) return;
    const heading = section.querySelector("h2");
    document.title = `${before.title} · ${heading.textContent.trim()}`;
    scrollTo({ top: 0, behavior: "instant" });
    heading.focus({ preventScroll: true });
  };

  const showPage = () => {
    document.title = before.title;
    scrollTo({ top: before.top, behavior: "instant" });
    before.focus?.focus({ preventScroll: true });
  };

  // Go to the view of the next layer (`by` 1), or of the one before (-1).
  hookscope.step = (by) => {
    const all = sections();
    const next = all[all.indexOf(hookscope.openSection()) + by];
    if (next) hookscope.go({ layer: next.dataset.layer, image: hookscope.readHash().image }, { replace: true });
  };

  hookscope.closeLayer = () => hookscope.go({});

  // A link to a layer gets its channel and its image too: without scripts a page cannot show them.
  const completeLinks = () => {
    for (const link of document.querySelectorAll("a[data-channel], a[data-image]")) {
      const layer = new URLSearchParams(link.hash.slice(1)).get("layer");
      if (layer !== null) link.setAttribute("href", hashOf({ layer, ...link.dataset }));
    }
  };

  // Follow a link to a layer; the browser would take the focus away from it before the layer is shown.
  const follow = (event) => {
    const link = event.target.closest("a[href^='#layer=']");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    hookscope.go(hookscope.readHash(link.getAttribute("href"))); // a link in a drawing has no `hash`
  };

  addEventListener("hashchange", show);
  addEventListener("DOMContentLoaded", () => {
    addEventListener("click", follow);
    completeLinks();
    show();
  });
}

// The keyboard.
{
  const step = (by) => () => (hookscope.openSection() ? hookscope.step(by) : hookscope.list?.move(by));
  const onPage = (action) => () => hookscope.openSection() || (hookscope.list && action(hookscope.list));

  const showFilter = () => {
    if (hookscope.openSection()) hookscope.closeLayer();
    hookscope.list?.filter.focus();
  };

  const showKeys = () => document.getElementById("keys").showModal();

  const KEYS = {
    j: step(1),
    k: step(-1),
    h: onPage((list) => list.foldCurrent()),
    l: onPage((list) => list.unfoldCurrent()),
    "/": showFilter,
    "?": showKeys,
    Escape: () => hookscope.openSection() && hookscope.closeLayer(),
  };

  const onKey = (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea, dialog")) return;
    if (event.key === "Enter" && event.target.matches(".calls tbody tr")) hookscope.list.enter();
    if (!Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  };

  const skip = (event) => {
    event.preventDefault(); // the hash says which layer is open
    document.getElementById("content").focus();
  };

  addEventListener("DOMContentLoaded", () => {
    addEventListener("keydown", onKey);
    document.querySelector(".skip").addEventListener("click", skip);
    document.getElementById("show-keys")?.addEventListener("click", showKeys);
  });
}
