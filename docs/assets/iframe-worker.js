// Browsers refuse `new Worker(url)` in a page that was opened as a file. This stands in for it there: the script runs in
// a hidden frame of its own, and messages are passed between the two windows.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.body.appendChild(document.createElement("iframe"));
      this.frame.hidden = true;
      const inside = this.frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source === inside) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      const load = (src) => `<script src="${new URL(src, document.baseURI)}"><\/script>`;
      inside.document.write(`<script>
        const parentWindow = parent;
        window.postMessage = (data) => parentWindow.postMessage(data, "*");
        window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = done;
          document.head.appendChild(script);
        })), Promise.resolve());
      <\/script>${load(url)}`);
      inside.document.close();
      this.ready = new Promise((done) => (this.frame.onload = done));
    }
    postMessage(data) {
      this.ready.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data, source: window })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
