// Zoom and details of the picture beside this script. Bars are stretched by their lanes; text is written anew.
(() => {
  const root = document.currentScript.parentNode;
  const svg = root.querySelector("svg");
  const data = JSON.parse(root.querySelector(".data").textContent);
  const tip = root.querySelector(".tooltip");
  const lanes = svg.querySelectorAll("svg.lane");
  const ink = svg.querySelector(".ink");
  const scale = svg.querySelector(".scale");
  const hair = svg.querySelector(".hair");
  const [left, right] = data.x;
  let from = 0, to = data.seconds, drag = null;

  for (const title of svg.querySelectorAll("title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  const place = (seconds) => left + (seconds - from) / (to - from) * (right - left);
  const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const cut = (name, most) => {
    if (name.length <= most) return name;
    const first = name.split(" .. ")[0];
    return first.length <= most ? first : ".." + first.slice(first.length - most + 2).replace(/^\.+/, "");
  };
  const bytes = (n) => n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(2)} GiB`
    : n >= 2 ** 20 ? `${(n / 2 ** 20).toFixed(2)} MiB` : `${(n / 1024).toFixed(2)} KiB`;
  const text = (kind, x, y, content, anchor = "middle") =>
    `<text class="${kind}" x="${x.toFixed(1)}" y="${y}" text-anchor="${anchor}">${escaped(content)}</text>`;

  function axis() {
    let step = 10 ** Math.floor(Math.log10((to - from) / 10));
    step *= [1, 2, 5, 10].find((factor) => (to - from) / (step * factor) <= 10);
    const digits = Math.max(0, -Math.floor(Math.log10(step * 1e3) + 1e-9));
    let found = "";
    for (let i = Math.ceil(from / step); i * step <= to; i++) {
      const x = place(i * step);
      found += `<line class="grid" x1="${x}" x2="${x}" y1="${data.top}" y2="${data.bottom}"/>`;
      found += text("dim", x, data.bottom + 16, (i * step * 1e3).toFixed(digits));
    }
    return found + text("dim", right, data.bottom + 34, "milliseconds", "end");
  }
  function names() {
    let found = "";
    for (const lane of ["compute", "copies"]) {
      for (const [start, stop, name] of data[lane]) {
        const a = Math.max(left, place(start)), b = Math.min(right, place(stop));
        if (b - a > data.room) {
          found += text("in", (a + b) / 2, data.middle[lane], cut(name, Math.floor((b - a - 8) / data.character)));
        }
      }
    }
    return found;
  }
  function waits() {
    const shown = data.stalls.filter(([start, stop]) => stop > from && start < to);
    shown.sort(([a, b], [c, d]) => (d - c) - (b - a));
    const taken = [], y = data.top - 26;
    let found = "";
    for (const [start, stop, name] of shown) {
      const at = (Math.max(left, place(start)) + Math.min(right, place(stop))) / 2;
      const x = Math.min(right - data.apart / 2, Math.max(left + data.apart / 2, at));
      if (taken.some((other) => Math.abs(other - x) < data.apart)) continue;
      taken.push(x);
      found += text("wait", x, y, cut(name, data.letters));
      found += text("wait", x, y + 13, `${((stop - start) * 1e3).toFixed(2)} ms`);
      found += `<line class="lead" x1="${x}" x2="${at}" y1="${y + 16}" y2="${data.top}"/>`;
    }
    return found;
  }
  function draw() {
    for (const lane of lanes) {
      const high = lane.getAttribute("viewBox").split(" ")[3];
      const units = data.units / data.seconds;
      lane.setAttribute("viewBox", `${from * units} 0 ${(to - from) * units} ${high}`);
    }
    scale.innerHTML = axis();
    ink.innerHTML = names() + waits();
  }
  function view(start, stop) {
    const wide = Math.min(data.seconds, Math.max(stop - start, data.seconds / 1e5));
    from = Math.max(0, Math.min(start, data.seconds - wide));
    to = from + wide;
    draw();
  }
  function pointed(event) {
    const box = svg.getBoundingClientRect();
    return from + ((event.clientX - box.left) / box.width * data.width - left) / (right - left) * (to - from);
  }
  function show(event) {
    const at = pointed(event), box = root.getBoundingClientRect();
    const inside = at >= from && at <= to;
    tip.style.display = hair.style.display = inside ? "block" : "none";
    if (!inside) return;
    hair.setAttribute("x1", place(at));
    hair.setAttribute("x2", place(at));
    const memory = data.memory.filter(([start]) => start <= at).pop();
    let content = event.target.dataset && event.target.dataset.tip ? event.target.dataset.tip + "\n" : "";
    content += `at ${(at * 1e3).toFixed(3)} ms`;
    if (memory) content += `: weights ${bytes(memory[1])} in ${bytes(memory[2])}`;
    if (memory && memory[3] !== null) content += `, all tensors ${bytes(memory[3])}`;
    tip.textContent = content;
    tip.style.left = `${Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY - box.top + 16}px`;
  }
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const at = pointed(event), factor = Math.exp(event.deltaY / 400);
    view(at - (at - from) * factor, at + (to - at) * factor);
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => { drag = [event.clientX, from, to]; });
  addEventListener("pointerup", () => { drag = null; });
  svg.addEventListener("dblclick", () => view(0, data.seconds));
  svg.addEventListener("pointermove", (event) => {
    if (drag) {
      const wide = svg.getBoundingClientRect().width / data.width * (right - left);
      const moved = (drag[0] - event.clientX) / wide * (drag[2] - drag[1]);
      view(drag[1] + moved, drag[2] + moved);
    }
    show(event);
  });
  svg.addEventListener("pointerleave", () => { tip.style.display = hair.style.display = "none"; });
  draw();
})();
