// Sentences as a model gets them: split and joined, kept without words, and cut when too long, by the same rules as in
// hf_vaswani/model/sentences_vaswani.py, whose constants are in RULES. Places in a text are counted as JavaScript does.
// Lookbehind in patterns and String.at() need Chrome 92, Firefox 90 or Safari 16.4.

// ---- Sentences of a text -----------------------------------------------------------------------------------------

const [WORD, INVISIBLE, REPEATED, SPACE, CHARACTER, BEHIND_PUNCTUATION] =
  ["WORD", "INVISIBLE", "REPEATED", "SPACE", "CHARACTER", "BEHIND_PUNCTUATION"].map((name) => new RegExp(RULES[name], "gu"));
const [LINE_BREAK, ENDED, WORDS] = ["LINE_BREAK", "ENDED", "WORDS"].map((name) => new RegExp(RULES[name], "u"));
const [LINK, LANGUAGE_TAG, NO_TITLE, DIGIT] = ["LINK", "LANGUAGE_TAG", "NO_TITLE", "DIGIT"]
  .map((name) => new RegExp(`^(?:${RULES[name]})`, "u"));
const ABBREVIATION = new RegExp(`^(?:${RULES.ABBREVIATION})$`, "u");
const IS_UNSPACED = new RegExp(`${RULES.UNSPACED}{4}`, "u");

// Characters by the names of their constants.
const set = (...names) => new Set(names.flatMap((name) => [...RULES[name]]));
const [WIDE_MARKS, WIDE_CLOSING, STRIPPED] = [set("WIDE_MARKS"), set("WIDE_CLOSING"), set("STRIPPED")];
const BEHIND = set("CLOSING", "WHITE_SPACE", "HIDDEN"), IN_FRONT = set("OPENING", "HIDDEN");

// Returns start and end of each sentence of a text, with only white space between them. A text without a word is one
// sentence.
function sentenceSpans(text) {
  const spans = [];
  let begin = 0, before = null;
  for (const word of text.matchAll(WORD)) {
    if (before === null) {
      begin = word.index;
    } else {
      const end = before.index + before[0].length;
      if (LINE_BREAK.test(text.slice(end, word.index)) || endsSentence(before[0], word[0])) {
        spans.push([begin, end]);
        begin = word.index;
      }
    }
    before = word;
  }
  return before === null ? [[0, text.length]] : [...spans, [begin, before.index + before[0].length]];
}

// Returns whether a sentence ends between two words.
function endsSentence(word, after) {
  if (isWide(word)) {
    // A sentence continues after a quotation with a comma or with hiragana.
    return !/^[，、]/u.test(after) && !(WIDE_CLOSING.has(word.at(-1)) && /^[ぁ-ゟ]/u.test(after));
  }
  const bare = stripEnd(word, BEHIND);
  const first = stripStart(after, IN_FRONT);
  if (!ENDED.test(bare) || (NO_TITLE.test(first) && !LINK.test(first))) return false;
  return !(bare.endsWith(".") && (DIGIT.test(first) || ABBREVIATION.test(word)));
}

// Returns whether a text ends with a sentence mark of a script without spaces.
function isWide(text) {
  const bare = stripEnd(text, WIDE_CLOSING);
  return bare !== "" && WIDE_MARKS.has(bare.at(-1));
}

function stripStart(text, characters = STRIPPED) {
  let start = 0;
  while (start < text.length && characters.has(text[start])) start++;
  return text.slice(start);
}

function stripEnd(text, characters = STRIPPED) {
  let end = text.length;
  while (end > 0 && characters.has(text[end - 1])) end--;
  return text.slice(0, end);
}

// Returns whether a text has a visible letter.
function hasWords(text) {
  return WORDS.test(text);
}

// Returns a text without words, for which a model would invent something, or null for one that has words.
function kept(text) {
  return hasWords(text) ? null : text;
}

// Returns what a model reads of a text: all but its invisible signs. A text without words stays as it is.
function visible(text) {
  return hasWords(text) ? text.replace(INVISIBLE, "") : text;
}

// Returns the translation of a sentence; that of one word without words that stand four times in a row or more.
function withoutRepetition(source, translation) {
  const words = stripStart(stripEnd(source.replace(new RegExp(RULES.LANGUAGE_TAG, "gu"), "")));
  const isWord = words !== "" && words.search(SPACE) < 0 && !IS_UNSPACED.test(source);
  return isWord ? translation.replace(REPEATED, "$<g1>") : translation;
}

// ---- Language tags -----------------------------------------------------------------------------------------------

// Splits a text into the one of the tags of a vocabulary at its beginning and a space, or nothing, and the rest.
function splitTag(text, tags) {
  const rest = stripStart(text), found = LANGUAGE_TAG.exec(rest);
  return found && tags.includes(found[0]) ? [`${found[0]} `, stripStart(rest.slice(found[0].length))] : ["", text];
}

// ---- Long sentences ----------------------------------------------------------------------------------------------

// A text in parts, which are translated one by one: what is in front of each, the text without it, and start and end of
// each part, with only white space around it.
class Parts {
  constructor(front, text, spans) {
    Object.assign(this, { front, text, spans });
  }

  // The parts as a model reads them, each with its front.
  get sources() {
    return this.spans.map(([start, end]) => this.front + visible(this.text.slice(start, end)));
  }

  // For each part the text that stands for its translation, or null if the model reads it.
  get kept() {
    return this.spans.map(([start, end]) => kept(this.text.slice(start, end)));
  }

  // Joins translations of the parts by the white space of the text. Where it has none or spaces alone, there is a space
  // at least, but nothing after a mark of a script without spaces, or beside an empty translation.
  join(translations) {
    let joined = "", tail = "", end = 0;
    // To look at the end of a text that grows would copy it each time.
    const add = (piece) => {
      joined += piece;
      tail = stripEnd(piece, WIDE_CLOSING) ? piece : tail + piece;
    };
    this.spans.forEach(([start, nextEnd], i) => {
      const space = this.text.slice(end, start);
      if (i === 0 || /[^ ]/u.test(space)) add(space);
      else if (translations[i] && tail && !STRIPPED.has(tail.at(-1)) && !isWide(tail)) add(space || " ");
      add(translations[i]);
      end = nextEnd;
    });
    return joined + this.text.slice(end);
  }
}

// Cuts a text into what is translated at a time: into its sentences, if it is to be split, and what countTokens finds
// longer than longest (null: no limit) into pieces of at most half as many. White space around the text is in no part.
function cut(front, text, countTokens, longest, split = false) {
  const fits = (part, most) => !hasWords(part) || countTokens(front + visible(part)) <= most;
  const begin = text.length - stripStart(text).length;
  const whole = begin < text.length ? [begin, stripEnd(text).length] : [0, text.length];
  const spans = [];
  for (const [start, end] of split ? sentenceSpans(text) : [whole]) {
    const sentence = text.slice(start, end);
    const pieces = longest === null || fits(sentence, longest)
      ? [[0, sentence.length]] : fittingSpans(sentence, (part) => fits(part, Math.floor(longest / 2)));
    for (const [left, right] of pieces) spans.push([start + left, start + right]);
  }
  return new Parts(front, text, spans);
}

// Splits a text into sentences, and halves sentences until all pieces fit: near the middle, at white space, else behind
// punctuation, else between characters. Returns start and end of each piece, with only white space between them.
function fittingSpans(text, fits) {
  const found = [];
  const pending = sentenceSpans(text).reverse();
  while (pending.length) {
    const [start, end] = pending.pop();
    const sentence = text.slice(start, end);
    if (/^.?$/su.test(sentence) || fits(sentence)) {
      found.push([start, end]);
      continue;
    }
    const place = middle(sentence);
    const left = stripEnd(sentence.slice(0, place)), right = stripStart(sentence.slice(place));
    pending.push([end - right.length, end], [start, start + left.length]);
  }
  return found;
}

// Returns where a sentence without white space at its ends is cut in two.
function middle(sentence) {
  const half = Math.floor([...sentence].length / 2);
  let places = Array.from(sentence.matchAll(SPACE), (space) => space.index + space[0].length);
  if (!places.length) {
    const ends = Array.from(sentence.matchAll(CHARACTER), (match) => match.index + match[0].length).slice(0, -1);
    const behind = new Set(Array.from(sentence.matchAll(BEHIND_PUNCTUATION), (match) => match.index));
    places = ends.filter((end) => behind.has(end));
    if (!places.length) places = ends;
    if (!places.length) places = [[...sentence].slice(0, half).join("").length];
  }
  // Python counts code points.
  let nearest = 0, least = Infinity, before = 0, points = 0;
  for (const place of places) {
    points += [...sentence.slice(before, place)].length;
    before = place;
    if (Math.abs(points - half) < least) [nearest, least] = [place, Math.abs(points - half)];
  }
  return nearest;
}
