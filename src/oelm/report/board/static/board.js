// Keeps the page up to date: asks the server every two seconds, and replaces only elements that have changed.
"use strict";
(() => {
  const EVERY = 2000;
  const tags = new Map();      // address -> the ETag of its last answer
  const contents = new Map();  // id of a live element -> its last content from the server

  // Returns the text of the server's answer, or null if it has not changed since the last request.
  async function changed(address) {
    const headers = tags.has(address) ? { "If-None-Match": tags.get(address) } : {};
    const answer = await fetch(address, { headers, cache: "no-store" });
    if (answer.status === 304) return null;
    // The study or run of this page was deleted, or exists now. Loading the page again shows it.
    if (address === location.href && (answer.status === 404) !== Boolean(document.getElementById("missing"))) location.reload();
    if (answer.status === 404) return null;
    if (!answer.ok) throw new Error(String(answer.status));
    tags.set(address, answer.headers.get("ETag"));
    return answer.text();
  }

  function replaceLive(text) {
    const page = new DOMParser().parseFromString(text, "text/html");
    for (const fresh of page.querySelectorAll("[data-live]")) {
      const old = document.getElementById(fresh.id);
      if (!old || contents.get(fresh.id) === fresh.innerHTML) continue;
      contents.set(fresh.id, fresh.innerHTML);
      const open = new Set([...old.querySelectorAll("details[open]")].map((details) => details.id));
      const focused = old.contains(document.activeElement) ? path(old, document.activeElement) : null;
      const scrolled = [...old.querySelectorAll(".scroll, pre")].map((box) => [box.scrollLeft, box.scrollTop]);
      old.replaceChildren(...fresh.childNodes);
      for (const details of old.querySelectorAll("details")) details.open = open.has(details.id);
      old.querySelectorAll(".scroll, pre").forEach((box, i) => { if (scrolled[i]) [box.scrollLeft, box.scrollTop] = scrolled[i]; });
      if (focused) follow(old, focused)?.focus({ preventScroll: true });
    }
    document.title = page.title;
    updateChoices(page);
    applyFilters();
  }

  // Charts are not replaced. Measurements that are new are added to their lists of choices.
  function updateChoices(page) {
    const fresh = page.querySelector(".charts"), old = document.querySelector(".charts");
    if (!fresh || !old) return;
    const choices = old.querySelectorAll("[data-measurement]");
    const fromServer = fresh.querySelectorAll("[data-measurement]");
    if (choices.length !== fromServer.length) {
      old.replaceChildren(...fresh.childNodes);
      tags.clear();
      return;
    }
    choices.forEach((select, i) => {
      if (select.options.length === fromServer[i].options.length) return;
      const chosen = select.value;
      select.replaceChildren(...fromServer[i].childNodes);
      select.value = chosen;
    });
  }

  // The path from an ancestor to an element as child indices, to restore the focus after a replacement.
  function path(top, node) {
    const steps = [];
    for (; node !== top; node = node.parentElement) steps.unshift([...node.parentElement.children].indexOf(node));
    return steps;
  }
  function follow(top, steps) {
    return steps.reduce((node, i) => node?.children[i], top);
  }

  function applyFilters() {
    for (const input of document.querySelectorAll("[data-filter]")) {
      const wanted = input.value.trim().toLowerCase();
      for (const row of document.querySelectorAll(`#${input.dataset.filter} tbody tr`)) {
        row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
      }
    }
  }

  async function updateChart(figure) {
    const measurement = figure.querySelector("[data-measurement]").value;
    const text = await changed(`${figure.dataset.source}&measurement=${encodeURIComponent(measurement)}`);
    if (text !== null && figure.querySelector("[data-measurement]").value === measurement) oelmChart(figure, JSON.parse(text));
  }

  async function update() {
    const connection = document.getElementById("connection");
    try {
      if (!document.hidden) {
        const text = await changed(location.href);
        if (text !== null) replaceLive(text);
        for (const figure of document.querySelectorAll("figure.chart")) await updateChart(figure);
      }
      connection.textContent = connection.dataset.on;
      connection.className = "on";
    } catch (error) {
      connection.textContent = connection.dataset.off;
      connection.className = "off";
    }
    setTimeout(update, EVERY);
  }

  for (const element of document.querySelectorAll("[data-live]")) contents.set(element.id, element.innerHTML);
  document.addEventListener("change", (event) => {
    const figure = event.target.matches("[data-measurement]") && event.target.closest("figure");
    if (!figure) return;
    tags.delete(`${figure.dataset.source}&measurement=${encodeURIComponent(event.target.value)}`);
    updateChart(figure);
  });
  for (const input of document.querySelectorAll("[data-filter]")) input.addEventListener("input", applyFilters);
  update();
})();
