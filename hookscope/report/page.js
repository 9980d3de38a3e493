"use strict";

// The one global: what the scripts of a page share.
const hookscope = {};

// With this class the style sheet hides what only scripts show. It is set before the page is drawn.
document.documentElement.classList.add("js");

{
  // Where the reader is: "#layer=3&channel=17&image=0". Numbers, or null where the hash has none.
  hookscope.readHash = () => {
    const fields = new URLSearchParams(location.hash.slice(1));
    const number = (name) => (/^\d+$/.test(fields.get(name) ?? "") ? Number(fields.get(name)) : null);
    return { layer: number("layer"), channel: number("channel"), image: number("image") };
  };

  // Go there. With `replace`, the browser's way back does not stop at where the reader was.
  hookscope.go = (place, { replace = false } = {}) => {
    const fields = ["layer", "channel", "image"].filter((name) => place[name] != null);
    const hash = "#" + fields.map((name) => `${name}=${place[name]}`).join("&");
    if (replace) history.replaceState(null, "", hash);
    else history.pushState(null, "", hash);
    show();
  };

  // Show the view that the hash names: a layer, or the whole page.
  const show = () => {
    const place = hookscope.readHash();
    for (const section of document.querySelectorAll("section.layer")) {
      section.classList.toggle("open", Number(section.dataset.layer) === place.layer);
    }
    if (document.querySelector("section.layer.open")) hookscope.openLayer(place.layer, place);
  };

  addEventListener("hashchange", show);
  addEventListener("DOMContentLoaded", show);
}
