// Questions to begin with: two that drafts help by much, as measured, and one that is honest.
// `drafthouse try` asks the same.

export const PRESETS = await (await fetch(new URL("presets.json", import.meta.url))).json();
