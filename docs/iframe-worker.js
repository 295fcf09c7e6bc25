// The search of the site computes in a worker, which browsers refuse to pages that are opened from files.
// There the script of the worker runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      // Opened and closed: Firefox would replace the frame's first document later, and the script with it.
      frame.contentDocument.open();
      frame.contentDocument.close();
      this.scope = frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = frame.contentDocument.createElement("script");
          script.src = source;
          script.onload = resolve;
          script.onerror = reject;
          frame.contentDocument.body.append(script);
        });
      this.scope.importScripts = (...sources) => Promise.all(sources.map(load));
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
      this.loaded = load(address);
      this.terminate = () => frame.remove();
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
}
