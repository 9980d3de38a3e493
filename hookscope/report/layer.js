// The numbers of a layer: levels come from the bytes of its pictures, and values from levels.
{
  const bytesOf = (address) => {
    const text = atob(address.slice(address.indexOf(",") + 1));
    const bytes = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
    return bytes;
  };

  // The palette indices of a PNG without filters: the pixel (x, y) is `indices[y * stride + 1 + x]`.
  const readPicture = async (address) => {
    const bytes = bytesOf(address);
    const view = new DataView(bytes.buffer);
    const parts = [];
    for (let at = 8; at < bytes.length; at += 12 + view.getUint32(at)) {
      const isData = view.getUint32(at + 4) === 0x49444154; // IDAT
      if (isData) parts.push(bytes.subarray(at + 8, at + 8 + view.getUint32(at)));
    }
    const inflated = new Blob(parts).stream().pipeThrough(new DecompressionStream("deflate"));
    return { stride: view.getUint32(16) + 1, indices: new Uint8Array(await new Response(inflated).arrayBuffer()) };
  };

  const fromText = (value) => (typeof value === "number" ? value : { nan: NaN, inf: Infinity, "-inf": -Infinity }[value]);

  // The maps of a layer for one image; `at` is the position of a channel among those that are on the page.
  class Maps {
    constructor(facts, picture, frames, codes) {
      Object.assign(this, facts);
      this.codes = codes;
      this.frames = frames;
      this.isSingle = "values" in facts;
      this.picture = picture; // none for maps of one position
      if (this.isSingle) Object.assign(this, { height: 1, width: 1, values: facts.values.map(fromText) });
      this.frameWidth = this.width / frames;
    }

    // The palette indices of one map, row by row.
    indices(at) {
      const { stride, indices } = this.picture;
      const { height, width, columns } = this;
      const top = Math.floor(at / columns) * (height + this.codes.gap);
      const left = (at % columns) * (width + this.codes.gap) + 1;
      const map = new Uint8Array(height * width);
      for (let y = 0; y < height; y++) {
        const start = (top + y) * stride + left;
        map.set(indices.subarray(start, start + width), y * width);
      }
      return map;
    }

    valueOf(index, at) {
      const { codes, low, high } = this;
      if (index === codes.nan) return NaN;
      if (index === codes.plus) return Infinity;
      if (index === codes.minus) return -Infinity;
      if (index === codes.constant) return low[at];
      const share = index / (codes.levels - 1);
      return low[at] * (1 - share) + high[at] * share;
    }

    value(at, y, x) {
      return this.isSingle ? this.values[at] : this.valueOf(this.indices(at)[y * this.width + x], at);
    }

    // A value differs from the one of the layer by at most so much.
    halfStep(at) {
      if (this.isSingle || this.low[at] === null) return 0;
      return this.high[at] / (this.codes.levels - 1) / 2 - this.low[at] / (this.codes.levels - 1) / 2;
    }

    rangeWords(at) {
      const [low, high] = [this.low[at], this.high[at]];
      return low === null ? "no finite value" : `${hookscope.short(low)} to ${hookscope.short(high)}`;
    }

    isConstant(at) {
      return this.low[at] !== null && this.low[at] === this.high[at] && !(at in this.nonfinite);
    }

    // How the order of the channels is measured; the largest comes first.
    measure(order, at) {
      if (order === "range") {
        if (this.low[at] === null) return 0;
        return this.isSingle ? Math.abs(this.values[at]) : this.high[at] - this.low[at];
      }
      return this[order]?.[at] ?? null;
    }

    // Counts of finite values in `bins` equal intervals of their range.
    histogram(at, bins) {
      const counts = new Array(bins).fill(0);
      const top = this.codes.levels - 1;
      for (const index of this.indices(at)) {
        if (index === this.codes.constant) counts[bins >> 1] += 1;
        else if (index <= top) counts[Math.min(bins - 1, Math.floor((index * bins) / top))] += 1;
      }
      return counts;
    }
  }

  // A layer of the page, with its maps for each image (null where there are none).
  hookscope.readLayer = async (section) => {
    const layer = JSON.parse(section.querySelector(".numbers").textContent);
    const codes = hookscope.colours();
    const pictures = [...section.querySelectorAll("img.maps")];
    const read = layer.images.map(async (facts, image) => {
      const picture = pictures.find((element) => Number(element.dataset.image) === image);
      return facts && new Maps(facts, picture && (await readPicture(picture.src)), layer.frames, codes);
    });
    return { ...layer, number: Number(section.dataset.layer), images: await Promise.all(read) };
  };

  // With enough digits to tell two levels apart.
  hookscope.digits = (value, halfStep) => {
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "+Inf" : "-Inf";
    const count = halfStep > 0 ? Math.ceil(Math.log10(Math.abs(value) / halfStep)) + 2 : 9;
    const text = value.toPrecision(Math.min(17, Math.max(3, count || 3)));
    return halfStep > 0 ? text : String(Number(text));
  };

  // A few digits, for labels.
  hookscope.short = (value, count = 4) => {
    if (value === null) return "–";
    return Number.isFinite(value) ? String(Number(value.toPrecision(count))) : hookscope.digits(value, 0);
  };
}

// Scales and colours.
{
  let codes = null;

  // The colour maps, and the palette indices that are no levels.
  hookscope.colours = () => {
    if (codes) return codes;
    codes = JSON.parse(document.getElementById("colour-tables").textContent);
    for (const [name, table] of Object.entries(codes.tables)) codes.tables[name] = asPixels(atob(table));
    return codes;
  };

  // Red, green, blue as the numbers of 32 bits that a canvas takes.
  const asPixels = (text) => {
    const bytes = new Uint8ClampedArray((text.length / 3) * 4).fill(255);
    for (let at = 0; at < text.length; at++) bytes[Math.floor(at / 3) * 4 + (at % 3)] = text.charCodeAt(at);
    return new Uint32Array(bytes.buffer);
  };

  // The lowest and the highest of pairs, null without any.
  const union = (pairs) => {
    const real = pairs.filter(([low]) => low !== null);
    if (!real.length) return null;
    return [Math.min(...real.map(([low]) => low)), Math.max(...real.map(([, high]) => high))];
  };

  // The values of the first and the last colour for a channel of an image; null if it has no finite value.
  hookscope.limits = (layer, image, at, { scale, joint }) => {
    const images = layer.images.filter((maps, other) => maps && (joint || other === image));
    if (scale === "channel") return union(images.map(({ low, high }) => [low[at], high[at]]));
    const limits = union(images.map(({ lowest, highest }) => [lowest, highest]));
    if (scale === "layer" || !limits) return limits;
    const most = Math.max(-limits[0], limits[1], limits[0], -limits[1]);
    return [-most, most];
  };

  // The colour of each palette index of a channel on a scale.
  hookscope.lookup = (maps, at, limits, name) => {
    const { levels, constant, tables } = hookscope.colours();
    const table = tables[name];
    const colours = new Uint32Array(256);
    colours.set(table);
    if (!limits || limits[0] === limits[1]) return colours;
    const [low, high] = limits.map((limit) => limit / 2); // the difference of two large numbers may be none
    const colour = (value) => {
      const share = Math.min(1, Math.max(0, (value / 2 - low) / (high - low)));
      return table[Math.round(share * (levels - 1))];
    };
    for (let level = 0; level < levels; level++) colours[level] = colour(maps.valueOf(level, at));
    if (maps.low[at] !== null) colours[constant] = colour(maps.low[at]);
    return colours;
  };
}

// Drawing.
{
  const ORANGE = "#d65d0e";
  const LABEL = 19;
  const BETWEEN = 12; // between cells
  const BESIDE = 3; // between the maps of a cell, and between frames
  const SIDE = 72; // maps become about as large as this by whole numbers of pixels

  const scratch = document.createElement("canvas");

  // Draw the map of one channel on `scratch`, a pixel for each value.
  const paint = (maps, at, colours) => {
    const image = new ImageData(maps.width, maps.height);
    const pixels = new Uint32Array(image.data.buffer);
    const indices = maps.indices(at);
    for (let place = 0; place < indices.length; place++) pixels[place] = colours[indices[place]];
    if (scratch.width !== maps.width || scratch.height !== maps.height) {
      [scratch.width, scratch.height] = [maps.width, maps.height];
    }
    scratch.getContext("2d").putImageData(image, 0, 0);
    return scratch;
  };

  // The map of one frame on a canvas of its own, a pixel for each value.
  hookscope.paintFrame = (canvas, maps, at, frame, colours) => {
    [canvas.width, canvas.height] = [maps.frameWidth, maps.height];
    canvas.getContext("2d").drawImage(paint(maps, at, colours), -frame * maps.frameWidth, 0);
  };

  hookscope.paintBar = (canvas, name) => {
    const { levels, tables } = hookscope.colours();
    const image = new ImageData(levels, 1);
    new Uint32Array(image.data.buffer).set(tables[name].subarray(0, levels));
    [canvas.width, canvas.height] = [levels, 1];
    canvas.getContext("2d").putImageData(image, 0, 0);
  };

  // All channels of a layer in rows. A band is a canvas with a few rows, which is drawn when it comes into sight.
  hookscope.Grid = class {
    constructor(root, layer) {
      this.root = root;
      this.layer = layer;
      this.sight = new IntersectionObserver((entries) => this.onSight(entries), { rootMargin: "300px" });
      new ResizeObserver(() => this.onResize()).observe(root);
      addEventListener("beforeprint", () => this.bands?.forEach((band) => this.draw(band)));
      for (const media of ["(prefers-color-scheme: dark)", "print"]) {
        matchMedia(media).addEventListener("change", () => this.redraw());
      }
    }

    // Show the channels `order` of the images `shown` with `settings`.
    show(order, shown, settings) {
      Object.assign(this, { order, shown, settings });
      this.layOut();
    }

    onResize() {
      if (this.order && this.root.clientWidth && this.root.clientWidth !== this.laidOutFor) this.layOut();
    }

    layOut() {
      const ratio = devicePixelRatio;
      const maps = this.shown.map((image) => this.layer.images[image]);
      const side = Math.max(...maps.map(({ frameWidth, height }) => Math.max(frameWidth, height)));
      this.laidOutFor = this.root.clientWidth;
      const padding = 2 * parseFloat(getComputedStyle(this.root).paddingLeft);
      this.zoom = Math.max(1, Math.round((SIDE * ratio) / side));
      this.pixel = this.zoom / ratio;
      this.widths = maps.map(({ width, frames }) => width * this.pixel + (frames - 1) * BESIDE);
      this.cellWidth = this.widths.reduce((sum, width) => sum + width + BESIDE, -BESIDE);
      this.stepX = this.cellWidth + BETWEEN;
      this.stepY = Math.max(...maps.map(({ height }) => height)) * this.pixel + LABEL + BETWEEN;
      this.columns = Math.max(1, Math.floor((this.laidOutFor - padding + BETWEEN) / this.stepX));
      this.columns = Math.min(this.columns, this.order.length);
      this.widest = Math.max(...this.order.map((at) => this.strength(at)));
      this.makeBands();
    }

    strength(at) {
      return Math.max(...this.shown.map((image) => this.layer.images[image].measure("range", at)));
    }

    makeBands() {
      this.sight.disconnect();
      const rows = Math.ceil(this.order.length / this.columns);
      const perBand = Math.max(1, Math.floor(480 / this.stepY));
      this.bands = [];
      for (let row = 0; row < rows; row += perBand) this.bands.push(this.band(row, Math.min(rows, row + perBand)));
      this.root.replaceChildren(...this.bands.map(({ canvas }) => canvas));
      for (const { canvas } of this.bands) this.sight.observe(canvas);
    }

    band(first, end) {
      const canvas = document.createElement("canvas");
      canvas.style.width = `${this.columns * this.stepX - BETWEEN}px`;
      canvas.style.height = `${(end - first) * this.stepY}px`;
      return { canvas, first, end, isDrawn: false };
    }

    onSight(entries) {
      for (const { target, isIntersecting } of entries) {
        const band = this.bands.find(({ canvas }) => canvas === target);
        if (isIntersecting && band) this.draw(band);
      }
    }

    redraw() {
      for (const band of this.bands ?? []) {
        if (!band.isDrawn) continue;
        band.isDrawn = false;
        this.draw(band);
      }
    }

    draw(band) {
      if (band.isDrawn) return;
      band.isDrawn = true;
      const ratio = devicePixelRatio;
      band.canvas.width = Math.round((this.columns * this.stepX - BETWEEN) * ratio);
      band.canvas.height = Math.round((band.end - band.first) * this.stepY * ratio);
      const context = band.canvas.getContext("2d");
      context.imageSmoothingEnabled = false;
      const style = getComputedStyle(this.root);
      this.ink = { text: style.color, faint: style.getPropertyValue("--faint"), font: style.fontFamily };
      const start = band.first * this.columns;
      const cells = this.order.slice(start, band.end * this.columns);
      cells.forEach((at, place) => {
        const x = (place % this.columns) * this.stepX;
        const y = Math.floor(place / this.columns) * this.stepY;
        this.drawLabel(context, at, x * ratio, y * ratio, ratio);
        this.drawMaps(context, at, x * ratio, (y + LABEL) * ratio, ratio);
      });
    }

    drawMaps(context, at, x, y, ratio) {
      let left = Math.round(x);
      this.shown.forEach((image) => {
        const maps = this.layer.images[image];
        const limits = hookscope.limits(this.layer, image, at, this.settings);
        const map = paint(maps, at, hookscope.lookup(maps, at, limits, this.settings.colours));
        const width = maps.frameWidth * this.zoom;
        for (let frame = 0; frame < maps.frames; frame++) {
          const from = [frame * maps.frameWidth, 0, maps.frameWidth, maps.height];
          context.drawImage(map, ...from, left, Math.round(y), width, maps.height * this.zoom);
          left += width + Math.round(BESIDE * ratio);
        }
      });
    }

    // The number of a channel, what it is sorted by, and an orange bar: its range relative to the widest.
    drawLabel(context, at, x, y, ratio) {
      const width = this.cellWidth * ratio;
      context.textBaseline = "alphabetic";
      context.font = `600 ${12 * ratio}px ${this.ink.font}`;
      context.fillStyle = this.ink.text;
      const number = this.label(at);
      context.fillText(number, x, y + 12 * ratio);
      const taken = context.measureText(number).width + 8 * ratio;
      context.font = `${11 * ratio}px ${this.ink.font}`;
      context.fillStyle = this.ink.faint;
      const beside = this.beside(at);
      const space = context.measureText(beside).width;
      if (space + taken <= width) context.fillText(beside, x + width - space, y + 12 * ratio);
      context.fillStyle = ORANGE;
      const length = this.widest > 0 ? (this.strength(at) / this.widest) * width : 0;
      context.fillRect(x, y + 15 * ratio, length, 2 * ratio);
    }

    label(at) {
      const images = this.shown.map((image) => this.layer.images[image]);
      const isBad = images.some(({ nonfinite }) => at in nonfinite);
      const isConstant = images.every((maps) => maps.isConstant(at));
      return `${this.layer.channels[at]}${isBad ? " !" : isConstant ? " =" : ""}`;
    }

    beside(at) {
      const { order } = this.settings;
      if (order === "number") return this.layer.names[at] ?? "";
      const measured = hookscope.measure(this.layer, this.shown, order, at);
      return measured === null ? "" : order === "zeros" ? hookscope.percent(measured) : hookscope.short(measured, 2);
    }

    // What is under the pointer: the position of the channel, the image, and the place in its map; null between maps.
    under(event) {
      const band = this.bands?.find(({ canvas }) => canvas === event.target);
      if (!band) return null;
      const column = Math.floor(event.offsetX / this.stepX);
      const row = Math.floor(event.offsetY / this.stepY);
      const at = this.order[(band.first + row) * this.columns + column];
      if (at === undefined || column >= this.columns) return null;
      return { at, ...this.placeIn(event.offsetX - column * this.stepX, event.offsetY - row * this.stepY - LABEL) };
    }

    placeIn(x, y) {
      let left = 0;
      for (const [which, image] of this.shown.entries()) {
        const maps = this.layer.images[image];
        const step = maps.frameWidth * this.pixel + BESIDE;
        const inside = x - left;
        const frame = Math.floor(inside / step);
        const [column, row] = [Math.floor((inside - frame * step) / this.pixel), Math.floor(y / this.pixel)];
        if (inside >= 0 && frame < maps.frames && column < maps.frameWidth && row >= 0 && row < maps.height) {
          return { image, y: row, x: frame * maps.frameWidth + column };
        }
        left += this.widths[which] + BESIDE;
      }
      return { image: null };
    }

    // Mark a channel, and show where it is.
    mark(at, { scroll = false } = {}) {
      const place = this.order.indexOf(at);
      this.frame ??= Object.assign(document.createElement("div"), { className: "here" });
      if (place < 0) return void this.frame.remove();
      const [row, column] = [Math.floor(place / this.columns), place % this.columns];
      const first = this.bands[0].canvas;
      Object.assign(this.frame.style, {
        left: `${first.offsetLeft + column * this.stepX - 4}px`,
        top: `${first.offsetTop + row * this.stepY - 2}px`,
        width: `${this.cellWidth + 8}px`,
        height: `${this.stepY - BETWEEN + 6}px`,
      });
      this.root.append(this.frame);
      if (scroll) this.frame.scrollIntoView({ block: "nearest" });
    }
  };
}

// The view of a layer.
{
  const BINS = 24;
  const FIRST_BARS = 100;
  const SIDE_BY_SIDE = 4; // so many images, unless the reader chose one

  // What the reader chose, for all layers.
  const settings = { scale: "channel", colours: "viridis", joint: true };
  const views = new Map();

  hookscope.percent = (share) => `${Number((100 * share).toPrecision(3))} %`;

  // The mean over images of what channels are sorted by.
  hookscope.measure = (layer, shown, order, at) => {
    const values = shown.map((image) => layer.images[image].measure(order, at)).filter((value) => value !== null);
    return values.length ? values.reduce((sum, value) => sum + value / values.length, 0) : null;
  };

  // Positions of the channels, the largest first; equal ones by their numbers, those without a value last.
  const sorted = (layer, shown, order) => {
    const all = [...layer.channels.keys()];
    if (order === "number") return all;
    const measured = all.map((at) => hookscope.measure(layer, shown, order, at) ?? -Infinity);
    return all.sort((a, b) => measured[b] - measured[a] || a - b);
  };

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };

  class LayerView {
    constructor(section, layer) {
      Object.assign(this, { section, layer, cursor: null });
      section.append(document.getElementById("layer-tools").content.cloneNode(true));
      section.classList.add("ready");
      this.find = (selector) => section.querySelector(selector);
      this.channels = this.find(".channels");
      this.enlarged = this.find(".enlarged");
      this.readout = this.find(".readout");
      this.present = layer.images.flatMap((maps, image) => (maps ? [image] : []));
      this.first = layer.images[this.present[0]];
      this.isSingle = Boolean(this.first?.isSingle);
      section.classList.toggle("single", this.isSingle);
      this.order = this.isSingle && layer.names.length ? "mean" : "number";
      this.prepareOrders();
      this.current = 0;
      if (!this.isSingle) this.grid = new hookscope.Grid(this.channels, layer);
      this.explainMarks();
      this.listen();
    }

    prepareOrders() {
      const control = this.control("order");
      const option = (value) => control.querySelector(`[value=${value}]`);
      option("answer").disabled = !this.first?.answer;
      if (this.isSingle) {
        option("range").textContent = "|value|";
        option("mean").textContent = "value";
        option("zeros").remove();
      }
      control.value = this.order;
    }

    // Which channels have values that are no levels.
    explainMarks() {
      const images = this.present.map((image) => this.layer.images[image]);
      const all = [...this.layer.channels.keys()];
      const bad = all.filter((at) => images.some(({ nonfinite }) => at in nonfinite));
      const constant = all.filter((at) => !this.isSingle && images.every((maps) => maps.isConstant(at)));
      const list = (channels) => channels.slice(0, 8).map((at) => this.layer.channels[at]).join(", ") + (channels.length > 8 ? ", …" : "");
      const words = (channels) => `channel${channels.length > 1 ? "s" : ""} ${list(channels)}`;
      const marks = [];
      if (bad.length) marks.push(this.isSingle ? `NaN or Inf: ${words(bad)}` : `NaN magenta, +Inf red, -Inf light blue (!): ${words(bad)}`);
      if (constant.length) marks.push(`constant, grey (=): ${words(constant)}`);
      this.find(".marks").textContent = marks.join(" · ");
    }

    control(name) {
      return this.find(`[name=${name}]`);
    }

    listen() {
      for (const control of this.section.querySelectorAll(".tools select, .tools input")) {
        control.addEventListener("change", () => this.onControl(control));
      }
      this.channels.addEventListener("pointermove", (event) => this.onPointer(event));
      this.channels.addEventListener("click", (event) => this.onClick(event));
      this.channels.addEventListener("keydown", (event) => this.onKey(event));
      this.section.addEventListener("keydown", (event) => this.onSectionKey(event));
      this.control("previous").addEventListener("click", () => this.step(-1));
      this.control("next").addEventListener("click", () => this.step(1));
      this.control("close").addEventListener("click", () => this.close());
      this.control("opacity").addEventListener("input", () => this.setOpacity());
    }

    onControl(control) {
      if (control.name === "image") return this.go({ image: control.value === "" ? null : Number(control.value) });
      if (control.name === "order") this.order = control.value;
      else settings[control.name] = control.type === "checkbox" ? control.checked : control.value;
      if (control.name === "scale") this.changeColours();
      return this.show(hookscope.readHash());
    }

    // Show another channel or image; the browser's way back leaves the layer.
    go(place) {
      hookscope.go({ ...hookscope.readHash(), layer: this.layer.number, ...place }, { replace: true });
    }

    // A scale that is symmetric about 0 has a colour map with a middle, unless the reader chose another.
    changeColours() {
      if (settings.scale === "symmetric" && settings.colours === "viridis") settings.colours = "RdBu_r";
      else if (settings.scale !== "symmetric" && settings.colours === "RdBu_r") settings.colours = "viridis";
    }

    // Show the layer, with one image unless it is null, and enlarge a channel unless it is null.
    show({ channel, image }) {
      if (!this.first) return;
      const isChosen = this.present.includes(image);
      this.shown = isChosen ? [image] : this.present.slice(0, SIDE_BY_SIDE);
      this.setControl("image", isChosen ? image : "");
      for (const name of ["scale", "colours", "joint"]) this.setControl(name, settings[name]);
      this.sequence = sorted(this.layer, this.shown, this.order);
      if (this.isSingle) this.showBars(channel);
      else this.showMaps(channel);
    }

    setControl(name, value) {
      const control = this.control(name);
      if (control?.type === "checkbox") control.checked = value;
      else if (control) control.value = value;
    }

    showMaps(channel) {
      const at = this.layer.channels.indexOf(channel);
      this.showBar();
      this.showInputs();
      this.enlarged.hidden = at < 0;
      this.section.classList.toggle("enlarging", at >= 0);
      const key = JSON.stringify([settings, this.order, this.shown, this.channels.clientWidth]);
      if (key !== this.drawn) this.grid.show(this.sequence, this.shown, { ...settings, order: this.order });
      this.drawn = key;
      if (at < 0) return void this.grid.mark(-1);
      this.current = at;
      this.grid.mark(at);
      this.enlarge(at);
    }

    // The colour bar says what the colours mean.
    showBar() {
      const limits = hookscope.limits(this.layer, this.shown[0], 0, settings);
      const isShared = settings.scale !== "channel";
      const where = settings.joint && this.present.length > 1 ? " in all images" : "";
      this.find(".bar .low").textContent = isShared && limits ? hookscope.short(limits[0]) : `its lowest${where}`;
      this.find(".bar .high").textContent = isShared && limits ? hookscope.short(limits[1]) : `its highest value${where}`;
      hookscope.paintBar(this.find(".bar canvas"), settings.colours);
    }

    // What the network saw, at the left of the maps.
    showInputs() {
      const seen = (image) => element("img", { src: document.getElementById(`seen-${image}`).src, alt: "" });
      const figure = (image) => element("figure", {}, seen(image), element("figcaption", { textContent: this.imageName(image) }));
      this.find(".inputs").replaceChildren(...this.shown.map(figure));
    }

    nameOf(at) {
      const name = this.layer.names[at];
      return `channel ${this.layer.channels[at]}${name ? ` (${name})` : ""}`;
    }

    imageName(image) {
      return document.getElementById(`seen-${image}`).closest("article").getAttribute("aria-label");
    }

    // The value at a place of a map, in words.
    words({ at, image, y, x }) {
      if (image === null || image === undefined) return this.nameOf(at);
      const maps = this.layer.images[image];
      const [value, half] = [maps.value(at, y, x), maps.halfStep(at)];
      const frame = maps.frames > 1 ? `frame ${Math.floor(x / maps.frameWidth) + 1}, ` : "";
      const error = half > 0 && Number.isFinite(value) ? ` ± ${half.toPrecision(2)}` : "";
      const where = `${frame}y ${y}, x ${x % maps.frameWidth}`;
      const whose = this.present.length > 1 ? `${this.imageName(image)}, ` : "";
      return `${whose}${this.nameOf(at)} · ${where} · ${hookscope.digits(value, half)}${error}`;
    }

    say(text) {
      this.readout.textContent = text;
    }

    onPointer(event) {
      const place = this.grid?.under(event);
      if (place) this.say(this.words(place));
    }

    onClick(event) {
      const place = this.grid?.under(event);
      if (place) this.open(place.at);
    }

    open(at) {
      this.go({ channel: this.layer.channels[at] });
      this.find(".stage canvas")?.focus({ preventScroll: true });
      this.enlarged.scrollIntoView({ block: "nearest" });
    }

    close() {
      this.go({ channel: null });
      this.channels.focus({ preventScroll: true });
      this.grid.mark(this.current, { scroll: true });
    }

    // Enlarge the next channel of the order (`by` 1), or the one before (-1).
    step(by) {
      if (this.enlarged.hidden) return this.open(this.current);
      const place = this.sequence.indexOf(this.current) + by;
      return place >= 0 && place < this.sequence.length && this.open(this.sequence[place]);
    }

    onKey(event) {
      if (this.isSingle) return;
      const last = this.sequence.length - 1;
      const place = Math.max(0, this.sequence.indexOf(this.current));
      const { columns } = this.grid;
      const moves = { ArrowRight: place + 1, ArrowLeft: place - 1, ArrowDown: place + columns, ArrowUp: place - columns };
      const next = { ...moves, Home: 0, End: last }[event.key];
      if (event.key === "Enter") this.open(this.current);
      else if (next !== undefined) this.goTo(Math.min(last, Math.max(0, next)));
      else return;
      event.preventDefault();
      event.stopPropagation();
    }

    goTo(place) {
      this.current = this.sequence[place];
      this.grid.mark(this.current, { scroll: true });
      this.sayRanges(this.current);
    }

    sayRanges(at) {
      const whose = (image) => (this.present.length > 1 ? `${this.imageName(image)}: ` : "");
      const ranges = this.shown.map((image) => whose(image) + this.layer.images[image].rangeWords(at));
      this.say(`${this.nameOf(at)} · ${ranges.join(" · ")}`);
    }

    // An enlarged channel: a stage for each frame of each image, with what is known of the channel below.
    enlarge(at) {
      this.find(".enlarged h3").textContent = this.nameOf(at).replace(/^c/, "C");
      const stages = this.shown.map((image) => this.imageStages(image, at));
      this.find(".stages").replaceChildren(...stages);
      this.showFilter(at);
      this.showExemplars(at);
      this.setOpacity();
      this.sayRanges(at);
    }

    // The images of a collection that excite the channel most: a copy of what the layer has for all channels.
    showExemplars(at) {
      const folded = this.find(".enlarged .exemplars-of"); // null on a page without exemplars
      if (!folded) return;
      const found = this.find(`[data-exemplars="${this.layer.channels[at]}"]`);
      folded.hidden = !found;
      const parts = [...(found?.children ?? [])].filter((part) => part.tagName !== "H3");
      folded.querySelector("div").replaceChildren(...parts.map((part) => part.cloneNode(true)));
    }

    imageStages(image, at) {
      const maps = this.layer.images[image];
      const limits = hookscope.limits(this.layer, image, at, settings);
      const colours = hookscope.lookup(maps, at, limits, settings.colours);
      const frames = Array.from({ length: maps.frames }, (_, frame) => this.stage(image, at, frame, colours));
      const title = this.present.length > 1 ? [element("figcaption", { className: "whose", textContent: this.imageName(image) })] : [];
      const below = [this.scaleBar(limits), this.histogram(maps, at), this.facts(maps, at)];
      const figure = element("figure", { className: "of-image" }, ...title, element("div", { className: "frames" }, ...frames), ...below);
      if (maps.frames === 1) figure.style.maxWidth = `${Math.max(160, maps.width * this.stageZoom(maps))}px`;
      return figure;
    }

    stage(image, at, frame, colours) {
      const maps = this.layer.images[image];
      const canvas = element("canvas", { tabIndex: 0 });
      canvas.setAttribute("role", "application");
      canvas.setAttribute("aria-label", `${this.nameOf(at)}, ${this.imageName(image)}, ${maps.height}×${maps.frameWidth}: arrow keys read values`);
      hookscope.paintFrame(canvas, maps, at, frame, colours);
      const behind = element("img", { src: document.getElementById(`seen-${image}`).src, alt: "" });
      const cursor = element("div", { className: "cursor", hidden: true });
      const stage = element("div", { className: "stage" }, behind, canvas, cursor);
      const zoom = this.stageZoom(maps);
      Object.assign(stage.style, { width: `${maps.frameWidth * zoom}px`, height: `${maps.height * zoom}px` });
      const put = (y, x) => this.putCursor({ at, image, y, x: frame * maps.frameWidth + x }, cursor, zoom, x);
      canvas.addEventListener("pointermove", (event) => put(...this.pixelUnder(event, maps, zoom)));
      canvas.addEventListener("keydown", (event) => this.moveCursor(event, maps, frame, put));
      canvas.addEventListener("blur", () => (cursor.hidden = true));
      canvas.addEventListener("pointerleave", () => (cursor.hidden = true));
      const label = maps.frames > 1 ? [element("span", { className: "frame", textContent: `frame ${frame + 1}` })] : [];
      return element("div", {}, stage, ...label);
    }

    // Whole pixels for each value; several images and frames share the width.
    stageZoom(maps) {
      const width = this.find(".stages").clientWidth || 400;
      const columns = Math.min(this.shown.length, Math.max(1, Math.floor((width + 16) / 160)));
      const beside = columns * (maps.frames > 1 ? Math.min(4, maps.frames) : 1);
      const room = Math.min(width / beside - 16, Math.max(224, innerHeight * 0.38));
      return Math.max(1, Math.floor(room / Math.max(maps.frameWidth, maps.height)));
    }

    pixelUnder(event, maps, zoom) {
      const inside = (offset, size) => Math.min(size - 1, Math.max(0, Math.floor(offset / zoom)));
      return [inside(event.offsetY, maps.height), inside(event.offsetX, maps.frameWidth)];
    }

    putCursor(place, cursor, zoom, x) {
      this.cursor = place;
      cursor.hidden = false;
      Object.assign(cursor.style, { left: `${x * zoom}px`, top: `${place.y * zoom}px`, width: `${zoom}px`, height: `${zoom}px` });
      this.say(this.words(place));
    }

    moveCursor(event, maps, frame, put) {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      if (!step) return;
      const left = frame * maps.frameWidth;
      const from = this.cursor ?? { y: -1, x: left - 1 };
      const clamp = (value, size) => Math.min(size - 1, Math.max(0, value));
      if (this.cursor) put(clamp(from.y + step[0], maps.height), clamp(from.x - left + step[1], maps.frameWidth));
      else put(0, 0);
      event.preventDefault();
      event.stopPropagation();
    }

    onSectionKey(event) {
      if (this.isSingle || event.target.matches("select, input:not([type=range])")) return;
      const close = this.enlarged.hidden ? null : () => this.close();
      const action = { Escape: close, n: () => this.step(1), p: () => this.step(-1) }[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      action();
    }

    scaleBar(limits) {
      const canvas = element("canvas");
      hookscope.paintBar(canvas, settings.colours);
      const [low, high] = limits ?? [null, null];
      const end = (value, className) => element("span", { className, textContent: hookscope.short(value) });
      return element("div", { className: "bar" }, end(low, "low"), canvas, end(high, "high"));
    }

    // How often values occur, from the lowest to the highest of this map.
    histogram(maps, at) {
      const counts = maps.histogram(at, BINS);
      const most = Math.max(1, ...counts);
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      svg.setAttribute("viewBox", `0 0 ${BINS} 20`);
      svg.setAttribute("preserveAspectRatio", "none");
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", `Histogram, from the lowest to the highest value: ${counts.join(", ")}`);
      svg.classList.add("distribution");
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", counts.map((count, bin) => `M${bin + 0.05} 20v${(-20 * count) / most}h.9V20z`).join(""));
      svg.append(path);
      const end = (value) => element("span", { textContent: hookscope.short(value) });
      const ends = element("div", { className: "ends" }, end(maps.low[at]), element("i", { textContent: `up to ${most.toLocaleString("en")} values` }), end(maps.high[at]));
      return element("div", { className: "histogram" }, svg, ends);
    }

    facts(maps, at) {
      const rows = [
        ["range", maps.rangeWords(at)],
        ["mean", hookscope.short(maps.mean[at])],
        ["zeros", maps.zeros[at] === null ? "–" : hookscope.percent(maps.zeros[at])],
      ];
      if (maps.answer) rows.push(["share in the answer", this.answerWords(maps, at)]);
      if (at in maps.nonfinite) rows.push(["NaN or Inf", `${maps.nonfinite[at].toLocaleString("en")} values`]);
      if (maps.isConstant(at)) rows.push(["constant", "every value is the same"]);
      const titles = { "share in the answer": "gradient × activation of the score of the best class, summed over the map" };
      const pair = ([name, value]) => element("div", { title: titles[name] ?? "" }, element("dt", { textContent: name }), element("dd", { textContent: value }));
      return element("dl", {}, ...rows.map(pair));
    }

    answerWords(maps, at) {
      const value = maps.answer[at];
      if (value === null) return "–";
      const share = maps.answerTotal ? ` (${hookscope.percent(Math.abs(value) / maps.answerTotal)} of the layer)` : "";
      return hookscope.short(value) + share;
    }

    async showFilter(at) {
      const { filters } = this.layer;
      this.find(".filter").hidden = !filters;
      if (!filters) return;
      const picture = this.find("img.filters");
      picture.loading = "eager";
      await picture.decode();
      const canvas = this.find(".filter canvas");
      [canvas.width, canvas.height] = [filters.width, filters.height];
      const zoom = Math.max(1, Math.floor(96 / Math.max(filters.width, filters.height)));
      canvas.style.width = `${filters.width * zoom}px`;
      const { gap } = hookscope.colours();
      const [row, column] = [Math.floor(at / filters.columns), at % filters.columns];
      canvas.getContext("2d").drawImage(picture, -column * (filters.width + gap), -row * (filters.height + gap));
    }

    setOpacity() {
      const share = Number(this.control("opacity").value) / 100;
      for (const canvas of this.section.querySelectorAll(".stage canvas")) canvas.style.opacity = share;
    }

    // Maps of one position: a bar for each channel.
    showBars(channel) {
      const chosen = this.layer.channels.indexOf(channel);
      const isChosenLate = this.sequence.indexOf(chosen) >= FIRST_BARS;
      const count = this.showsAll || isChosenLate ? this.sequence.length : FIRST_BARS;
      const values = this.shown.flatMap((image) => this.layer.images[image].values).filter(Number.isFinite);
      const ends = [Math.min(0, ...values), Math.max(0, ...values)];
      const rows = this.sequence.slice(0, count).map((at) => this.barRow(at, ends, at === chosen));
      const names = this.shown.map((image) => element("th", { scope: "col", textContent: this.imageName(image) }));
      const head = element("tr", {}, element("th", { scope: "col", textContent: "channel" }), ...names);
      const table = element("table", { className: "values" }, element("thead", {}, head), element("tbody", {}, ...rows));
      this.channels.removeAttribute("role");
      this.channels.replaceChildren(table);
      if (count < this.sequence.length) this.channels.append(this.moreButton());
      this.channels.querySelector(".chosen")?.scrollIntoView({ block: "center" });
    }

    moreButton() {
      const more = element("button", { type: "button", textContent: `Show all ${this.sequence.length.toLocaleString("en")} channels` });
      more.addEventListener("click", () => {
        this.showsAll = true;
        this.showBars(null);
      });
      return more;
    }

    barRow(at, ends, isChosen) {
      const name = this.layer.names[at] ?? "";
      const head = element("th", { scope: "row" }, element("b", { textContent: this.layer.channels[at] }), " ", name && element("bdi", { textContent: name }));
      const cells = this.shown.map((image) => element("td", {}, ...this.bar(this.layer.images[image].values[at], ends)));
      return element("tr", { className: isChosen ? "chosen" : "" }, head, ...cells);
    }

    // A bar from 0 to the value.
    bar(value, [low, high]) {
      const track = element("span", { className: "track" });
      const place = (end) => (high / 2 > low / 2 ? (end / 2 - low / 2) / (high / 2 - low / 2) : 0);
      if (Number.isFinite(value)) {
        const fill = element("span", { className: "fill" });
        const [from, to] = [place(Math.min(0, value)), place(Math.max(0, value))];
        Object.assign(fill.style, { left: `${100 * from}%`, width: `${100 * (to - from)}%` });
        track.append(fill);
      }
      return [track, element("span", { className: "value", textContent: hookscope.short(value, 6) })];
    }
  }

  // Read the numbers of a layer once, and show what the reader wants to see by then.
  const load = async (number) => {
    views.set(number, null);
    const section = document.querySelector(`section.layer[data-layer="${number}"]`);
    try {
      views.set(number, new LayerView(section, await hookscope.readLayer(section)));
    } catch (error) {
      section.classList.add("unread"); // its plain pictures stay
      throw error;
    }
    const place = hookscope.readHash();
    if (place.layer === number) views.get(number).show(place);
  };

  // Open the view of layer `number`; its section is shown already. `channel` and `image` may be null.
  hookscope.openLayer = (number, { channel, image }) => {
    if (views.has(number)) views.get(number)?.show({ channel, image });
    else load(number);
  };
}
