// Run the search worker in a hidden frame: a browser starts no worker for a page opened from a folder.
(() => {
  const prelude = () => {
    self.postMessage = (data) => parent.postMessage(data, "*");
    self.importScripts = (...urls) =>
      urls.reduce(
        (before, url) =>
          before.then(
            () =>
              new Promise((done) => {
                const script = document.createElement("script");
                script.src = url;
                script.onload = done;
                document.body.append(script);
              }),
          ),
        Promise.resolve(),
      );
  };

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.document.open(); // removes listeners of the window, so `onload` comes after it
      this.ready = new Promise((done) => (inner.onload = done));
      inner.document.write(`<body><script>(${prelude})()<\/script><script src="${url}"><\/script>`);
      inner.document.close();
      window.addEventListener("message", (event) => {
        if (event.source === inner) {
          const message = new MessageEvent("message", { data: event.data });
          this.dispatchEvent(message);
          this.onmessage?.(message);
        }
      });
    }
    postMessage(data) {
      this.ready.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })),
      );
    }
    terminate() {
      this.frame.remove();
    }
  }

  if (location.protocol === "file:") window.Worker = FrameWorker;
})();
