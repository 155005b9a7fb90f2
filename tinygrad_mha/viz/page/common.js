'use strict';
// All numbers and equations were computed by the run that wrote this page. This script draws them. It computes only
// colours, positions, and the terms of a product when its result is pointed at.

const read = id => JSON.parse(document.getElementById(id).textContent);
const get = id => document.getElementById(id);
const data = read('data'), words = read('words'), {facts, tokens} = data, count = tokens.length;

// ------------------------------------------------------------------------------------------------------------- words

const say = (key, fill = {}) => words[state.lang][key].replace(/\{(\w+)\}/g, (all, name) => fill[name] ?? all);

/** An element with a class, attributes and children. A string becomes a text node, never HTML. */
function make(tag, className = '', attributes = {}, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** W_Q1 as W with a subscript; its gradient as ∂L/∂W with a subscript. */
function title(name, gradient = false, turned = false) {
  const [stem, index] = name.split(/_(.*)/);
  const parts = [gradient ? '∂L/∂' + stem : stem];
  if (index) parts.push(make('sub', '', {}, index));
  if (turned) parts.push(make('sup', '', {}, 'T'));
  return make('span', 'name', {}, ...parts);
}

const spoken = (name, gradient) => (gradient ? '∂L/∂' : '') + name;

/** A sentence. In words.json, [X] stands for the name of a matrix. */
function sentence(key, names = {}, fill = {}) {
  return say(key, fill).split(/\[(\w+)\]/).map((part, i) => (i % 2 ? title(names[part] ?? part) : part));
}

const SIGNS = {' ': '␣', '\n': '⏎', '\t': '⇥'};

/** A token as text that is visible: white space alone is replaced by signs. */
const visible = token => (token.trim() ? token : token.replace(/[ \n\t]/g, c => SIGNS[c]) || '∅');
const quoted = token => `“${visible(token).trim()}”`;

// ----------------------------------------------------------------------------------------------------------- numbers

const percent = number => say('percent', {number});

function unpack(packed) {
  if (!packed) return null;
  const bytes = Uint8Array.from(atob(packed.f4 ?? packed.f8), c => c.charCodeAt(0));
  return packed.f8 === undefined ? new Float32Array(bytes.buffer) : new Float64Array(bytes.buffer);
}

const proper = text => text.replace(/-/g, '−');
const unfinished = v => (Number.isNaN(v) ? 'nan' : v > 0 ? '∞' : '−∞');

function fourDigits(v) {
  if (!Number.isFinite(v)) return unfinished(v);
  const size = Math.abs(v);
  return proper(v === 0 ? '0' : size < 1e-3 || size >= 1e5 ? v.toExponential(3) : v.toPrecision(4));
}

function shortNumber(v) {
  if (!Number.isFinite(v)) return unfinished(v);
  const size = Math.abs(v);
  return v === 0 ? '0' : proper(size < 0.01 || size >= 1000 ? v.toExponential(1) : v.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3));
}

/** The shortest text that gives exactly this number. */
function exact(v, array) {
  if (!Number.isFinite(v)) return unfinished(v);
  let text = String(v);
  if (array instanceof Float32Array) {
    for (let p = 1; p < 10 && Math.fround(text = Number(v.toPrecision(p))) !== v; p++);
  }
  return proper(String(text));
}

// ----------------------------------------------------------------------------------------------------------- colours

const dark = matchMedia('(prefers-color-scheme: dark)');
const LIGHT = {zero: [238, 240, 242], values: [[33, 102, 172], [214, 96, 30]], gradients: [[27, 120, 55], [146, 48, 143]],
  attention: [[238, 240, 242], [84, 39, 143]]};
const DARK = {zero: [44, 50, 58], values: [[84, 160, 228], [240, 140, 72]], gradients: [[92, 188, 116], [216, 124, 210]],
  attention: [[44, 50, 58], [184, 150, 255]]};

const palette = (m, gradient) => (gradient ? 'gradients' : m.kind === 'attention' ? 'attention' : 'values');

function colour(v, most, which) {
  const {zero, [which]: ends} = dark.matches ? DARK : LIGHT;
  if (v === -Infinity) return null;
  if (!Number.isFinite(v)) return dark.matches ? [255, 255, 255] : [20, 20, 20];
  const part = which === 'attention' ? v : most ? v / most : 0;
  const t = Math.min(1, Math.abs(part)) ** 0.8, end = ends[part > 0 ? 1 : 0];
  return zero.map((z, i) => Math.round(z + (end[i] - z) * t));
}

const css = rgb => (rgb ? `rgb(${rgb})` : 'transparent');

/** Black or white: the one with the better contrast on a colour, by WCAG's relative luminance (at least 4.5 to 1). */
function ink(rgb) {
  if (!rgb) return '';
  const [r, g, b] = rgb.map(v => (v <= 10 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? '#000' : '#fff';
}

// ---------------------------------------------------------------------------------------------------------- controls

function choices(id, legend, options, chosen, choose) {
  get(id).replaceChildren(make('legend', '', {}, legend), ...options.map((text, i) => {
    const input = make('input', '', {type: 'radio', name: id, value: i});
    input.checked = i === chosen;
    input.addEventListener('change', () => choose(i));
    return make('label', '', {}, input, make('span', '', {}, text));
  }));
}
