// Shows an answer while it is generated, and stops it. Without this script the page shows it whole.
"use strict";

const form = document.querySelector("form[data-stream]");
const turns = document.getElementById("turns");
const answer = document.getElementById("answer");
const progress = document.getElementById("progress");
const stop = document.getElementById("stop");
const send = form.querySelector("button:not([type])");
let controller = null;

function block(place, title, text) {
  const heading = document.createElement("h2");
  heading.textContent = title;
  const body = document.createElement("pre");
  body.tabIndex = 0;
  body.textContent = text;
  place.append(heading, body);
  return body;
}

function refuse(message) {
  const notice = document.createElement("p");
  notice.className = "notice bad";
  notice.setAttribute("role", "alert");
  notice.textContent = message;
  answer.append(notice);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) {
      const data = piece.split("\n").find((line) => line.startsWith("data: "));
      if (data && data !== "data: [DONE]") yield JSON.parse(data.slice(6));
    }
  }
}

async function follow(response, body) {
  const begin = performance.now();
  let first = null;
  let parts = 0;
  let usage = null;
  let isWhole = false;
  const show = () => {
    const seconds = first === null ? 0 : (performance.now() - first) / 1000;
    const count = usage ? usage.completion_tokens : parts;
    const rate = count > 1 && seconds > 0 ? `, ${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
    progress.textContent = `${count} ${usage ? "tokens" : "parts"}${usage ? rate : ""}`;
  };
  for await (const event of events(response)) {
    if (event.error) {
      refuse(event.error.message);
      return;
    }
    usage = event.usage || usage;
    const choice = event.choices[0];
    if (!choice) {
      show();
      continue;
    }
    const text = choice.delta ? choice.delta.content : choice.text;
    isWhole = isWhole || choice.finish_reason !== null;
    if (!text) continue;
    if (first === null) {
      first = performance.now();
      progress.title = `The first part came after ${((first - begin) / 1000).toFixed(2)} s`;
    }
    parts += 1;
    body.textContent += text;
    show();
  }
  if (!isWhole) refuse("The connection ended before the answer was complete. Send the text again.");
}

function remember(text, told) {
  if (!form.elements.is_chat || !form.elements.is_chat.checked) return;
  const chat = JSON.parse(form.elements.chat.value);
  chat.push({ role: "user", content: text }, { role: "assistant", content: told });
  form.elements.chat.value = JSON.stringify(chat);
  form.elements.text.value = "";
}

async function run() {
  const text = form.elements.text.value;
  controller = new AbortController();
  answer.replaceChildren();
  progress.textContent = "";
  const options = {
    method: "POST",
    body: new FormData(form),
    headers: { "HX-Request": "true", "X-CSRF-Token": form.elements.csrf.value },
    signal: controller.signal,
  };
  let body = null;
  try {
    const response = await fetch(form.dataset.stream, options);
    const target = response.headers.get("HX-Redirect");
    if (target) {
      location.assign(target);
      return;
    }
    if (!response.ok) {
      answer.innerHTML = await response.text(); // a part of a page, in which all names are escaped
      return;
    }
    block(turns, "You", text);
    body = block(turns, turns.dataset.model, "");
    await follow(response, body);
  } catch (error) {
    if (error.name === "AbortError") {
      progress.textContent += ", stopped";
    } else {
      refuse("The connection ended before the answer was complete. Send the text again.");
    }
  }
  if (body && body.textContent) remember(text, body.textContent);
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  send.disabled = true;
  stop.hidden = false;
  try {
    await run();
  } finally {
    send.disabled = false;
    stop.hidden = true;
  }
});

stop.addEventListener("click", () => controller.abort());
