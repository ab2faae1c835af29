// Markdown as elements. Text of a model becomes text nodes and elements that are made here, and never markup: there is
// no innerHTML in this page, and its policy of trusted types forbids it. Images are links, so that nothing is loaded.

const MAX_DEPTH = 8; // of quotes and lists in each other, and of emphasis
const MAX_LINK = 2048; // characters that are searched for the end of a link
const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^\|? *:?-+:? *(?:\| *:?-+:? *)*\|?$/; // of a line without blanks at its ends
const URL_START = /https?:\/\/[^\s<>"'`]+/y;

const shown = new WeakMap(); // of each target, the sources of the blocks that it has

// Shows `text` in `target`. Blocks that it has already stay as they are: an answer grows at its end.
export function render(target, text) {
  const blocks = split(text.replaceAll("\r\n", "\n").split("\n"));
  const sources = blocks.map((block) => `${block.kind}\n${block.lines.join("\n")}`);
  const before = shown.get(target) ?? [];
  let same = 0;
  while (same < before.length && same < sources.length && before[same] === sources[same]) same += 1;
  while (target.childNodes.length > same) target.lastChild.remove();
  for (const block of blocks.slice(same)) target.append(elementOf(block, 0));
  shown.set(target, sources);
}

export function make(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function split(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const kind = kindOf(lines, at);
    const end = ends[kind](lines, at);
    blocks.push({ kind, lines: lines.slice(at, end) });
    at = end;
  }
  return blocks;
}

function kindOf(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  const next = lines[at + 1]?.trim() ?? "";
  return line.includes("|") && next.includes("|") && TABLE_RULE.test(next) ? "table" : "paragraph";
}

function endWhere(lines, at, isEnd) {
  let end = at + 1;
  while (end < lines.length && !isEnd(end)) end += 1;
  return end;
}

const ends = {
  code(lines, at) {
    const fence = FENCE.exec(lines[at])[1];
    const end = endWhere(lines, at, (i) => {
      const line = lines[i].trim();
      return line.length >= fence.length && line === fence[0].repeat(line.length);
    });
    return Math.min(end + 1, lines.length);
  },
  heading: (lines, at) => at + 1,
  rule: (lines, at) => at + 1,
  quote: (lines, at) => endWhere(lines, at, (i) => !QUOTE.test(lines[i])),
  table: (lines, at) => endWhere(lines, at, (i) => !lines[i].includes("|")),
  paragraph: (lines, at) => endWhere(lines, at, (i) => !lines[i].trim() || kindOf(lines, i) !== "paragraph"),
  list(lines, at) {
    const isOrdered = isNumber(lines[at]);
    const indent = ITEM.exec(lines[at])[1].length;
    const end = endWhere(lines, at, (i) => {
      if (!lines[i].trim()) return false;
      const item = ITEM.exec(lines[i]);
      if (item && item[1].length <= indent + 1) return isNumber(lines[i]) !== isOrdered || RULE.test(lines[i]);
      if (lines[i].startsWith(" ".repeat(indent + 2))) return false;
      return !lines[i - 1].trim() || kindOf(lines, i) !== "paragraph";
    });
    return end;
  },
};

function isNumber(line) {
  return /\d/.test(ITEM.exec(line)[2][0]);
}

const makers = {
  code({ lines }) {
    const [, fence, language] = FENCE.exec(lines[0]);
    const last = lines.at(-1).trim();
    const isClosed = lines.length > 1 && last.length >= fence.length && last === fence[0].repeat(last.length);
    const pre = make("pre");
    pre.tabIndex = 0;
    pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
    pre.setAttribute("role", "region");
    pre.append(make("code", lines.slice(1, isClosed ? -1 : undefined).join("\n")));
    return pre;
  },
  heading({ lines }) {
    const level = HEADING.exec(lines[0])[1].length;
    let text = lines[0].trim().slice(level).trim();
    let inner = text.length;
    while (text[inner - 1] === "#") inner -= 1;
    if (inner < text.length && (inner === 0 || text[inner - 1] === " ")) text = text.slice(0, inner).trim();
    return inlineInto(make(`h${Math.min(level + 2, 6)}`), text, 0);
  },
  rule: () => make("hr"),
  quote: ({ lines }, depth) => blocksInto(make("blockquote"), lines.map((line) => line.replace(QUOTE, "")), depth),
  paragraph: ({ lines }, depth) => inlineInto(make("p"), lines.map((line) => line.trimStart()).join("\n"), depth),
  list({ lines }, depth) {
    const list = make(isNumber(lines[0]) ? "ol" : "ul");
    if (list.tagName === "OL") list.start = parseInt(ITEM.exec(lines[0])[2], 10);
    const indent = ITEM.exec(lines[0])[1].length;
    let item = null;
    let width = 0;
    const items = [];
    for (const line of lines) {
      const found = ITEM.exec(line);
      if (found && found[1].length <= indent + 1) {
        width = found[0].length;
        item = [line.slice(width)];
        items.push(item);
      } else {
        const blanks = line.length - line.trimStart().length;
        item.push(line.slice(Math.min(blanks, width)));
      }
    }
    for (const each of items) list.append(itemOf(each, depth));
    return list;
  },
  table({ lines }, depth) {
    const table = make("table");
    const [head, , ...rows] = lines.map(cellsOf);
    const row = (cells, name) => {
      const made = make("tr");
      head.forEach((_, column) => made.append(inlineInto(make(name), cells[column] ?? "", depth)));
      return made;
    };
    const parts = [make("thead"), make("tbody")];
    parts[0].append(row(head, "th"));
    for (const cells of rows) parts[1].append(row(cells, "td"));
    table.append(...parts);
    const frame = make("div", undefined, "table");
    frame.tabIndex = 0;
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", "Table");
    frame.append(table);
    return frame;
  },
};

function elementOf(block, depth) {
  return makers[block.kind](block, depth);
}

function blocksInto(parent, lines, depth) {
  if (depth >= MAX_DEPTH) {
    parent.append(make("p", lines.join("\n")));
    return parent;
  }
  for (const block of split(lines)) parent.append(elementOf(block, depth + 1));
  return parent;
}

// An item of one paragraph has its text alone.
function itemOf(lines, depth) {
  const made = blocksInto(make("li"), lines, depth);
  if (made.firstElementChild?.tagName === "P") {
    const first = made.firstElementChild;
    first.replaceWith(...first.childNodes);
  }
  return made;
}

function cellsOf(line) {
  const text = line.trim();
  const cells = [];
  let cell = "";
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (text[at] === "|") {
      if (at > 0) cells.push(cell.trim());
      cell = "";
    } else {
      cell += text[at];
    }
  }
  return text.endsWith("|") ? cells : [...cells, cell.trim()];
}

const DELIMITERS = { "**": "strong", "__": "strong", "~~": "del", "*": "em", "_": "em" };

// Appends `text` to `parent` with code, emphasis and links.
function inlineInto(parent, text, depth) {
  let plain = "";
  const unclosed = new Set(); // delimiters of which no further one follows
  const flush = () => {
    if (plain) parent.append(plain);
    plain = "";
  };
  const add = (element) => {
    flush();
    parent.append(element);
  };
  for (let at = 0; at < text.length; ) {
    const letter = text[at];
    const found = depth < MAX_DEPTH || letter === "`" ? spanAt(text, at, unclosed, depth) : null;
    if (found) {
      add(found.element);
      at = found.end;
    } else if (letter === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (letter === "\n") {
      const isBreak = plain.endsWith("  ") || plain.endsWith("\\");
      plain = isBreak ? plain.replace(/(?: +|\\)$/, "") : plain;
      if (isBreak) add(make("br"));
      else plain += "\n";
      at += 1;
    } else if (letter === "`" || letter in DELIMITERS || letter === "~") {
      const end = endOfRun(text, at);
      plain += text.slice(at, end);
      at = end;
    } else {
      plain += letter;
      at += 1;
    }
  }
  flush();
  return parent;
}

function endOfRun(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end;
}

// The element that begins at a place of `text`, and where it ends; null if none does.
function spanAt(text, at, unclosed, depth) {
  switch (text[at]) {
    case "`":
      return codeAt(text, at, unclosed);
    case "*":
    case "_":
    case "~":
      return emphasisAt(text, at, unclosed, depth);
    case "!":
      return text[at + 1] === "[" ? linkAt(text, at + 1) : null;
    case "[":
      return linkAt(text, at);
    case "<":
      return autolinkAt(text, at);
    case "h":
      return /\w/.test(text[at - 1] ?? "") ? null : urlAt(text, at);
    default:
      return null;
  }
}

function codeAt(text, at, unclosed) {
  const run = text.slice(at, endOfRun(text, at));
  if (unclosed.has(run)) return null;
  for (let end = text.indexOf(run, at + run.length); end >= 0; ) {
    const after = endOfRun(text, end);
    if (after - end === run.length) {
      const code = text.slice(at + run.length, end).replaceAll("\n", " ");
      const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
      return { element: make("code", isPadded ? code.slice(1, -1) : code), end: after };
    }
    end = text.indexOf(run, after);
  }
  unclosed.add(run);
  return null;
}

function emphasisAt(text, at, unclosed, depth) {
  const two = text.slice(at, at + 2);
  const mark = two in DELIMITERS ? two : text[at];
  if (!(mark in DELIMITERS) || unclosed.has(mark)) return null;
  const start = at + mark.length;
  const isWord = (letter) => /[\p{L}\p{N}]/u.test(letter ?? "");
  if (!text[start] || /\s/.test(text[start]) || (mark[0] === "_" && isWord(text[at - 1]))) return null;
  for (let end = text.indexOf(mark, start + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const after = end + mark.length;
    if (/\s/.test(text[end - 1]) || (mark[0] === "_" && isWord(text[after]))) continue;
    if (mark.length === 1 && (text[after] === mark || text[end - 1] === mark)) {
      end = endOfRun(text, end) - 1; // a part of a longer run
      continue;
    }
    return { element: inlineInto(make(DELIMITERS[mark]), text.slice(start, end), depth + 1), end: after };
  }
  unclosed.add(mark);
  return null;
}

function linkAt(text, at) {
  const near = text.slice(at, at + MAX_LINK);
  const middle = near.indexOf("](");
  if (middle < 0) return null;
  let open = 1;
  let end = middle + 2;
  while (end < near.length && open && near[end] !== "\n") {
    open += (near[end] === "(") - (near[end] === ")");
    end += 1;
  }
  if (open) return null;
  const [address] = near.slice(middle + 2, end - 1).trim().split(/\s/);
  const label = near.slice(1, middle) || address;
  const link = linkTo(address.replace(/^<|>$/g, ""));
  return { element: inlineInto(link ?? make("span"), label, MAX_DEPTH), end: at + end }; // no link in a link
}

function autolinkAt(text, at) {
  const near = text.slice(at, at + MAX_LINK);
  const found = /^<((?:https?|mailto):[^\s<>]+)>/.exec(near);
  const link = found && linkTo(found[1]);
  if (!link) return null;
  link.textContent = found[1];
  return { element: link, end: at + found[0].length };
}

function urlAt(text, at) {
  URL_START.lastIndex = at;
  const found = URL_START.exec(text);
  if (!found) return null;
  let address = found[0].slice(0, MAX_LINK);
  while (/[.,;:!?*_~)\]]$/.test(address) && !(address.endsWith(")") && address.includes("("))) address = address.slice(0, -1);
  const link = linkTo(address);
  if (!link) return null;
  link.textContent = address;
  return { element: link, end: at + address.length };
}

// A link to an absolute address of a protocol that runs no script, or null.
function linkTo(address) {
  if (!URL.canParse(address)) return null;
  const url = new URL(address);
  if (!PROTOCOLS.has(url.protocol)) return null;
  const link = make("a");
  link.href = url.href;
  link.title = url.href;
  link.rel = "noopener noreferrer nofollow";
  link.target = "_blank";
  return link;
}
