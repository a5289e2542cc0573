// Markdown of a model becomes HTML here and nowhere else.  Nothing of it may run, load or leave.

import { marked } from "./vendor/marked.js";
import "./vendor/purify.js";

const { DOMPurify } = globalThis;

// HTML and pictures in a text stay text; they never reach the parser of HTML.
const MARKS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (mark) => MARKS[mark]);
marked.use({ renderer: { html: ({ raw }) => escaped(raw), image: ({ raw }) => escaped(raw) } });

const ALLOWED = {
  ALLOWED_TAGS: [
    "a",
    "blockquote",
    "br",
    "code",
    "del",
    "em",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "hr",
    "li",
    "ol",
    "p",
    "pre",
    "strong",
    "table",
    "tbody",
    "td",
    "th",
    "thead",
    "tr",
    "ul",
  ],
  ALLOWED_ATTR: ["href", "start"],
  ALLOWED_URI_REGEXP: /^https?:/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  // The policy of Trusted Types is DOMPurify's own: no other text can become HTML here.
  RETURN_TRUSTED_TYPE: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("rel", "noopener noreferrer nofollow");
  node.setAttribute("target", "_blank");
  // Where it leads is shown: its text may claim something else.
  if (node.hasAttribute("href")) node.setAttribute("title", node.getAttribute("href"));
});

export function render(text, host) {
  host.innerHTML = DOMPurify.sanitize(marked.parse(text, { async: false, gfm: true }), ALLOWED);
}
