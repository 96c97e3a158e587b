// Sends the upload form with its progress. Without this script the browser sends it by itself.
"use strict";

const form = document.querySelector("form[data-upload]");
const sending = document.getElementById("sending");
const bar = sending.querySelector("progress");
const text = sending.querySelector("p");
const answer = document.getElementById("answer");
const stop = sending.querySelector("button");
const start = form.querySelector("button");
let request = null;

function refuse(title, sentences) {
  const notice = document.createElement("div");
  notice.className = "notice bad";
  notice.setAttribute("role", "alert");
  const heading = document.createElement("h2");
  heading.textContent = title;
  notice.append(heading);
  for (const sentence of sentences.filter(Boolean)) {
    const paragraph = document.createElement("p");
    paragraph.textContent = sentence;
    notice.append(paragraph);
  }
  answer.replaceChildren(notice);
}

function end() {
  sending.hidden = true;
  start.disabled = false;
}

function finish() {
  const target = request.getResponseHeader("HX-Redirect");
  if (target) {
    location.assign(target);
    return;
  }
  end();
  const kind = request.getResponseHeader("Content-Type") || "";
  if (kind.startsWith("text/html")) {
    answer.innerHTML = request.responseText; // a part of a page, in which all names are escaped
    document.getElementById("export").open = true;
  } else {
    const body = kind.startsWith("application/json") ? JSON.parse(request.responseText) : {};
    refuse("The upload was refused", [body.error || `Status ${request.status}`, body.next]);
  }
}

function show(event) {
  const percent = Math.floor((100 * event.loaded) / event.total);
  bar.value = percent;
  if (percent % 10 === 0) {
    text.textContent = percent < 100 ? `${percent} % is sent` : "The service reads the model";
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const files = Array.from(form.querySelectorAll("input[type=file]")).flatMap((input) => [...input.files]);
  const size = files.reduce((sum, file) => sum + file.size, 0);
  answer.replaceChildren();
  if (size > Number(form.dataset.most)) {
    refuse("Too large", [
      `The files have ${size} bytes together; the service takes at most ${form.dataset.most} now.`,
      "Send less, or ask the operator of this service to raise the limit.",
    ]);
    return;
  }
  request = new XMLHttpRequest();
  request.open("POST", form.action);
  request.setRequestHeader("HX-Request", "true");
  request.upload.onprogress = show;
  request.onload = finish;
  request.onerror = () => {
    end();
    refuse("The upload was interrupted", [
      "The connection ended before the service had answered. Nothing of the upload was kept.",
      "Next: check that the service is reachable, and upload again.",
    ]);
  };
  request.onabort = () => {
    end();
    refuse("The upload was stopped", ["Nothing of it was kept."]);
  };
  bar.value = 0;
  text.textContent = "The upload begins";
  sending.hidden = false;
  start.disabled = true;
  request.send(new FormData(form));
});

stop.addEventListener("click", () => request.abort());
