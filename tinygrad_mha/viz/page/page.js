const begin = JSON.parse(document.documentElement.dataset.state ?? '{}'); // how the page of a GPT or the lab opens it
const state = {lang: data.lang, head: 0, step: 0, gradients: false, decode: 0, ...begin};
state.head = Math.min(state.head, data.walks.length - 1);
state.step = Math.min(state.step, data.walks[state.head].length - 1);
if (state.decode > data.decode.length) state.decode = 0;
let pointed = null; // the row pointed at: {name, row, gradient}
let vectors = []; // all rows on the page, in the map and in the equations
const steps = () => data.walks[state.head];
const shown = step => (state.gradients ? step.backward : step.forward); // its equations

const matrices = Object.fromEntries(Object.entries(data.matrices).map(([name, m]) => {
  const most = array => array && array.reduce((a, v) => (Number.isFinite(v) ? Math.max(a, Math.abs(v)) : a), 0);
  const values = unpack(m.values), gradient = unpack(m.gradient);
  return [name, {...m, values, gradient, most: most(values), mostGradient: most(gradient)}];
}));
const patterns = data.reach.patterns.map(bits => Uint8Array.from(atob(bits), c => c.charCodeAt(0)));

/** Whether row i of `made` depends on row j of `from` in this run. */
function depends(made, i, from, j) {
  const index = data.reach.pairs[made]?.[from];
  if (index === undefined) return false;
  const bit = i * matrices[from].rows + j;
  return Boolean((patterns[index][bit >> 3] >> (7 - (bit & 7))) & 1);
}


// ---------------------------------------------------------------------------------------------------------- matrices

/** The state of row i of a matrix in decoding step `state.decode`: computed, cached or absent. */
function decodeState(m, i) {
  if (!state.decode || !m.tokens[0]) return '';
  const step = data.decode[state.decode - 1];
  return step.computed.includes(i) ? 'computed' : m.cached && step.cached.includes(i) ? 'cached' : 'absent';
}

/** Whether column j exists: while decoding, later tokens have no keys yet. */
const present = (m, j) => !state.decode || !m.tokens[1] || j < data.decode[state.decode - 1].read;

/** One matrix. Each row is a `vector`: horizontal, or vertical if the matrix is transposed.
 *  size: {w, h} of a cell, `digits` of its numbers (0: colours only), `label`: the width of the row names. */
function drawMatrix(name, size, {gradient = false, turned = false, small = false} = {}) {
  const m = matrices[name], array = gradient ? m.gradient : m.values, most = gradient ? m.mostGradient : m.most;
  const which = palette(m, gradient), figure = make('figure', `${m.kind} ${turned ? 'turned' : ''} ${small ? 'small' : ''}`);
  Object.assign(figure.dataset, {name, of: gradient ? 'gradients' : 'values'});
  const shape = turned ? [m.shape[1], m.shape[0]] : m.shape;
  const label = turned ? say('transposed', {name: spoken(name, gradient)}) : spoken(name, gradient);
  const largest = size.w < 36 || size.h < 18 ? 10 : size.w < 60 ? 11 : 12; // of all numbers, such that the longest fits
  const fit = text => Math.min(largest, (size.w - 2) / (0.6 * array.reduce((a, v) => Math.max(a, text(v).length), 1)));
  const decimals = Math.max(0, 1 - Math.floor(Math.log10(most || 1))); // two digits of the largest number
  const coarse = v => (v === 0 || !Number.isFinite(v) || decimals > 3 || most >= 1e4 ? shortNumber(v) : proper(v.toFixed(decimals).replace(/^-(?=[0.]+$)/, '')));
  const write = size.digits === 4 && fit(fourDigits) >= 9 ? fourDigits : fit(shortNumber) >= 8.5 ? shortNumber : coarse, fontSize = size.digits ? fit(write) : 0;
  const grid = make('div', 'grid', small ? {} : {role: 'table', 'aria-label': `${label}, ${shape.join(' × ')}`});
  if (size.h < 8 || (turned && size.w < 8)) grid.style.gap = 0;
  if (!small) figure.append(drawTop());
  for (let i = 0; i < m.rows; i++) {
    const vector = make('div', `vector ${decodeState(m, i)} ${size.digits ? '' : 'strip'}`, small ? {} : {role: 'row', tabindex: i ? -1 : 0});
    Object.assign(vector.dataset, {row: i});
    if (!small && m.tokens[0]) {
      vector.append(turned ? over(tokens[i], 'rowheader') : beside(tokens[i], 'rowheader'));
    } else if (!small) {
      vector.setAttribute('aria-label', say('row', {number: i + 1}));
    }
    const row = array.subarray(i * m.columns, (i + 1) * m.columns);
    if (size.digits) row.forEach((v, j) => vector.append(drawCell(v, j)));
    else vector.append(drawStrip(row));
    grid.append(vector);
    vectors.push({element: vector, name, row: i});
  }
  figure.append(grid);
  return figure;

  function drawCell(v, j) {
    const cell = make('span', 'cell', {role: 'cell', 'data-column': j});
    cell.style.width = size.w + 'px';
    cell.style.height = size.h + 'px';
    if (!present(m, j)) return cell;
    const rgb = colour(v, most, which);
    cell.style.backgroundColor = css(rgb);
    cell.style.color = ink(rgb);
    cell.textContent = write(v);
    cell.style.fontSize = fontSize + 'px';
    cell.title = exact(v, array);
    return cell;
  }

  function drawStrip(row) {
    const canvas = make('canvas', '', small ? {} : {role: 'cell', title: ' '});
    [canvas.width, canvas.height] = turned ? [1, row.length] : [row.length, 1];
    canvas.style.width = size.w * canvas.width + 'px';
    canvas.style.height = size.h * canvas.height + 'px';
    const context = canvas.getContext('2d'), side = !small && Math.min(size.w, size.h) >= 8 ? 8 : 1; // pixels of a cell
    [canvas.width, canvas.height] = [canvas.width * side, canvas.height * side];
    row.forEach((v, j) => {
      const rgb = present(m, j) && colour(v, most, which), [x, y] = turned ? [0, j * side] : [j * side, 0];
      if (!rgb) return;
      context.fillStyle = css(rgb);
      context.fillRect(x, y, side, side);
      context.fillStyle = ink(rgb) === '#000' ? 'rgba(0, 0, 0, .6)' : 'rgba(255, 255, 255, .7)';
      if (v < 0 && side > 1) context.fillRect(x + 2, y + 4, 4, 1); // the sign, for readers who do not see the colour
    });
    return canvas;
  }

  /** What stands over a matrix: its name and shape, and over columns that belong to tokens, those. */
  function drawTop() {
    const caption = make('figcaption', m.kind, {}, title(name, gradient, turned), make('b', '', {}, shape.join('×')));
    if (!size.digits && which !== 'attention') caption.append(make('b', '', {}, '±' + fourDigits(most)));
    if (m.kind && !gradient) caption.append(make('i', '', {}, say(m.kind)));
    if (m.rows < m.shape[0] || m.columns < m.shape[1]) {
      const [rows, columns] = turned ? [m.columns, m.rows] : [m.rows, m.columns];
      caption.append(make('i', '', {}, say('held', {rows, columns})));
    }
    const top = make('div', 'top', {}, caption);
    if (turned && m.tokens[0]) top.style.paddingBottom = roomOver(size.w) + 'px';
    if (m.tokens[1]) {
      const axis = make('div', 'axis', {'aria-hidden': 'true'}, ...tokens.map(turned ? beside : over));
      if (turned) grid.append(axis);
      else top.append(axis);
      axis.style.paddingLeft = turned ? '' : size.label + 1 + 'px';
      axis.style.gap = size.digits ? '' : 0;
    }
    return top;
  }

  function beside(token, role) {
    return tag(token, 'beside', role, size.label, size.h);
  }

  function over(token, role) {
    const element = tag(token, upright(size.w) ? `upright ${[...token].some(isWide) ? 'ideographs' : ''}` : 'flat', role, size.w);
    element.style.height = Math.max(0, roomOver(size.w) - 2) + 'px';
    if (size.w < 14) element.style.fontSize = size.w - 1 + 'px';
    return element;
  }

  function tag(token, className, role, width, height) {
    const element = make('span', 'tag ' + className, {title: token}, visible(token));
    if (typeof role === 'string') element.setAttribute('role', role);
    element.style.width = width + 'px';
    if (height) element.style.height = element.style.lineHeight = height + 'px';
    if (height < 14) element.style.fontSize = height - 1 + 'px';
    return element;
  }
}

// --------------------------------------------------------------------------------------------------------- equations

/** "∂V_1 = S_1ᵀ @ ∂H_1" as terms: matrices {name, gradient, turned}, and signs, which are strings. A divisor is one. */
function parse(text) {
  return text.replace(/ \/ /g, ' /\u00a0').split(' ').map(word => {
    const [, d, name, t] = word.match(/^(∂?)(.*?)(ᵀ?)$/);
    return name in matrices ? {name, gradient: Boolean(d), turned: Boolean(t)} : word;
  });
}

const isWide = c => c > '\u2e7f'; // an ideograph
const widthOf = text => [...text].reduce((a, c) => a + (isWide(c) ? 13.5 : 7.6), 0); // estimate in pixels
const longest = Math.max(...tokens.map(t => widthOf(visible(t)))) + 8;
const LABEL = Math.min(longest, 92) + 6; // the width of the tokens next to rows
const upright = w => w < Math.min(longest, 54); // tokens above narrow columns are written vertically
const roomOver = w => (w < 9 ? 0 : upright(w) ? Math.min(longest, 76) + 2 : 20); // no tokens above very narrow columns

/** The terms that stay in one line: it may break before an operator. */
function groupsOf(terms) {
  const groups = [];
  for (const term of terms) {
    if (!groups.length || ['=', '+', '|', '@', '*', '−'].includes(term)) groups.push([]);
    groups.at(-1).push(term);
  }
  return groups;
}

/** The sizes of the cells of an equation's matrices, such that the equation fits in one line if possible. */
function sizes(terms, width) {
  const sum = (list, f) => list.reduce((a, x) => a + f(x), 0);
  const figures = groupsOf(terms).flatMap(group => {
    const beside = sum(group.filter(t => !t.name), sign => 10 + 1.3 * widthOf(sign)) + 8;
    return group.filter(t => t.name).map(({name, turned}) => {
      const m = matrices[name], [across, down] = turned ? [m.rows, m.columns] : [m.columns, m.rows];
      return {across, down, beside, label: m.tokens[turned ? 1 : 0] ? LABEL : 0};
    });
  });
  const wide = figures.filter(f => f.across > 26), narrow = figures.filter(f => f.across <= 26);
  for (const f of wide) f.w = Math.max(1, Math.min(6, 320 / f.across));
  const taken = sum(figures, f => f.label + 12) + sum(wide, f => f.across * f.w)
    + sum(terms.filter(t => !t.name), text => 18 + 1.3 * widthOf(text));
  let w = (width - taken) / Math.max(1, sum(narrow, f => f.across * 1.04));
  const isSplit = w < 29; // in several lines: each matrix as wide as its line allows
  for (const f of figures) {
    if (isSplit && f.across <= 26) w = Math.min(44, (width - f.label - f.beside) / (f.across * 1.04));
    f.h = f.down <= 8 ? 28 : f.down <= 16 ? 24 : f.down <= 30 ? 16 : Math.max(f.label ? 10 : 2, Math.floor((f.label ? 420 : 384) / f.down));
    f.digits = f.w || w < 29 || f.h < 16 ? 0 : w < 52 ? 2 : 4;
    f.w ??= f.digits ? Math.floor(Math.min(62, w)) : Math.max(4, Math.min(16, (width - f.label - f.beside) / f.across));
  }
  return figures;
}

function drawEquation(text) {
  const [out, equals, ...rest] = parse(text), terms = equals ? [...rest, equals, out] : [out];
  const sized = sizes(terms, get('equations').clientWidth), line = make('div', 'equation');
  line.dataset.text = text;
  const over = terms.filter(t => t.name).map((t, i) => (matrices[t.name].tokens[t.turned ? 0 : 1] ? roomOver(sized[i].w) : 0));
  line.style.setProperty('--top', 24 + Math.max(...over) + 'px');
  const draw = term => (term.name ? drawMatrix(term.name, sized.shift(), term) : make('span', 'sign', {}, ...sign(term)));
  line.append(...groupsOf(terms).map(group => make('div', 'group', {}, ...group.map(draw))));
  line.lastChild.classList.add('result');
  return line;
}

/** A sign. Names of matrices in it have their index as a subscript. */
const sign = text => text.split(/(∂?[A-Za-z]+_[A-Za-z0-9_]+)/)
  .map((part, i) => (i % 2 ? title(part.replace('∂', ''), part.startsWith('∂')) : part));

/** The factors {a, b} of an equation of the form a @ b, a @ b / root or a / root @ b, and the root. */
function product(text) {
  const terms = parse(text).slice(2), divides = term => !term.name && term.startsWith('/');
  const [a, at, b, ...more] = terms.filter(term => !divides(term));
  return at === '@' && a.name && b?.name && !more.length ? {a, b, root: terms.find(divides)?.slice(2)} : null;
}

/** The sum that gives number (i, j) of a product, as text. */
function sumOf({a, b, root}, i, j) {
  const [ma, mb] = [matrices[a.name], matrices[b.name]], whole = m => m.columns === m.shape[1] && m.rows === m.shape[0];
  if (!whole(ma) || !whole(mb)) return '';
  const entry = (m, t, i, j) => (t.gradient ? m.gradient : m.values)[t.turned ? j * m.columns + i : i * m.columns + j];
  const length = a.turned ? ma.rows : ma.columns, bracketed = v => (v < 0 ? `(${fourDigits(v)})` : fourDigits(v));
  const term = k => `${bracketed(entry(ma, a, i, k))}·${bracketed(entry(mb, b, k, j))}`;
  const shown = Array.from({length: Math.min(length, 4)}, (_, k) => term(k)).join(' + ') + (length > 4 ? ' + …' : '');
  return '= ' + (root ? `(${shown}) / ${root}` : shown);
}

/** Mark row i of the first factor and column j of the second. */
function markFactors(line, {a, b}, i, j) {
  const figures = line.querySelectorAll('figure');
  const pick = (figure, index, vector) => figure.querySelectorAll(vector ? `.vector[data-row="${index}"]` : `[data-column="${index}"]`);
  for (const part of [...pick(figures[0], i, !a.turned), ...pick(figures[1], j, b.turned)]) part.classList.add('factor');
}

// --------------------------------------------------------------------------------------------------------------- map

/** The number of heads that have a step. */
const headsWith = out => data.walks.filter(walk => walk.some(step => step.out === out)).length;

/** The results of all steps in small: a column for each step, a lane for each head. */
function drawMap() {
  const lanes = data.walks.length, map = make('div', 'lanes');
  map.style.gridTemplateColumns = `auto repeat(${steps().length}, auto)`;
  steps().forEach((step, c) => {
    const button = make('button', 'step', {type: 'button', 'data-step': c}, make('small', '', {}, c + 1), title(step.out, state.gradients));
    button.style.gridColumn = c + 2;
    map.append(button);
  });
  const h = Math.max(1, Math.min(7, Math.floor(150 / (count * lanes))));
  data.walks.forEach((walk, lane) => {
    if (lanes > 1) {
      const tag = make('span', 'lane' + (lane === state.head ? ' chosen' : ''), {}, `${say('head')} ${lane + 1}`);
      tag.style.gridArea = `${lane + 2} / 1`;
      map.append(tag);
    }
    walk.forEach((step, c) => {
      const whole = headsWith(step.out) === lanes;
      if (whole && lane) return;
      const {columns} = matrices[step.out], w = Math.min(7, (step.out === 'Concat' ? 132 : 66) / columns);
      const figure = drawMatrix(step.out, {w: Math.max(w, 18 / columns), h, digits: 0}, {gradient: state.gradients, small: true});
      figure.style.gridArea = whole ? `2 / ${c + 2} / span ${lanes}` : `${lane + 2} / ${c + 2}`;
      Object.assign(figure.dataset, {step: c, ...(whole ? {} : {lane})});
      map.append(figure);
    });
  });
  get('map').replaceChildren(map);
}

function markMap() {
  for (const element of get('map').querySelectorAll('[data-step]')) {
    const here = Number(element.dataset.step) === state.step && (element.dataset.lane ?? String(state.head)) === String(state.head);
    if (here) element.setAttribute('aria-current', 'step');
    else element.removeAttribute('aria-current');
  }
  const map = get('map'), boxes = [...map.querySelectorAll('[aria-current]')].map(element => element.getBoundingClientRect());
  const left = Math.min(...boxes.map(box => box.left)), right = Math.max(...boxes.map(box => box.right));
  if (left < 0 || right > map.clientWidth) map.scrollLeft += left - map.clientWidth / 2;
}

// -------------------------------------------------------------------------------------------------------------- step

/** Which explanation fits an equation, by its form without the indices of names. "other" if none does. */
function form(kind, equation) {
  const text = equation.replace(/([A-Za-z]+)_[A-Za-z0-9_]+/g, '$1'), forms = words.forms[kind];
  return Object.keys(forms).find(key => new RegExp(`^(${forms[key]})$`).test(text)) ?? 'other';
}

function explanation(step) {
  const [equation] = shown(step), used = parse(equation).filter(term => term.name).map(term => term.name);
  const names = {out: step.out, last: used.at(-1)};
  for (const name of used) names[name.split('_')[0]] ??= name;
  const kind = form(state.gradients ? 'backward' : 'forward', equation);
  if (state.gradients) {
    const loss = Number.isFinite(facts.loss_value) ? fourDigits(facts.loss_value) : '';
    return [...sentence('back_' + kind, names), ...(step.out === 'Y' ? sentence('loss_' + facts.loss, names, {loss}) : [])];
  }
  const key = kind === 'X' && facts.layer !== undefined ? 'X_layer' : kind === 'Concat' && facts.n_head === 1 ? 'Concat_one' : kind;
  return [...sentence('why_' + key, names, facts), ...(names.b ? sentence('why_bias', names) : []),
    equation.includes('rotate(') ? say('why_rotate') : '', 'KV'.includes(kind) && headsWith(step.out) > 1 ? say('why_shared') : ''];
}

/** While decoding: what the step computed, and what the cache saved. */
function decodeNote() {
  if (!state.decode) return [];
  const t = state.decode, step = data.decode[t - 1], number = v => v.toLocaleString('en').replace(/,/g, '\u202f');
  const sum = key => data.decode.slice(0, t).reduce((a, s) => a + s[key], 0);
  const token = quoted(tokens[t - 1]), saving = percent(Math.round(100 - (100 * step.products) / step.products_without));
  const saved = {products: number(step.products), without: number(step.products_without), percent: saving,
    sum: number(sum('products')), sum_without: number(sum('products_without'))};
  const difference = step.difference === null ? 'nan' : fourDigits(step.difference);
  return [
    make('div', '', {}, t === 1 ? say('decoding_first', {token}) : say('decoding', {t, token, cached: step.cached.length})),
    make('div', '', {}, say('saved', saved), ' ', ...sentence(step.agrees ? 'agrees' : 'differs', {}, {difference})),
  ];
}

function drawStep() {
  const step = steps()[state.step];
  get('step').replaceChildren(say('step', {number: state.step + 1, name: say('name_' + form('forward', step.forward[0]))}), make('span', 'formula', {},
    ...parse(shown(step)[0]).flatMap(t => [' ', ...(t.name ? [title(t.name, t.gradient, t.turned)] : sign(t))])));
  get('why').replaceChildren(...explanation(step));
  get('note').replaceChildren(...decodeNote());
  get('note').hidden = !state.decode;
  vectors = vectors.filter(v => v.element.closest('#map'));
  get('equations').replaceChildren(...shown(step).map(drawEquation));
  get('back').disabled = state.step === 0;
  get('next').disabled = state.step === steps().length - 1;
  drawLegend();
  markMap();
  mark();
}

function drawLegend() {
  const bar = (which, low, high) => {
    const {zero, [which]: ends} = dark.matches ? DARK : LIGHT, swatch = make('span', 'swatch');
    swatch.style.background = `linear-gradient(to right, ${[ends[0], ...(which === 'attention' ? [] : [zero]), ends[1]].map(css)})`;
    return make('span', '', {}, low, swatch, high);
  };
  const key = (className, text) => make('span', '', {}, make('span', 'key ' + className), say(text));
  const equations = shown(steps()[state.step]);
  const palettes = new Set(equations.flatMap(parse).filter(t => t.name).map(t => palette(matrices[t.name], t.gradient)));
  const items = [...palettes].map(p => (p === 'attention' ? bar(p, '0', '1') : bar(p, say('lowest'), say('highest'))));
  items.push(key('here', 'row_here'), key('source', state.gradients ? 'gradient_source' : 'source'));
  items.push(key('target', state.gradients ? 'gradient_target' : 'target'));
  if (state.decode) items.push(...['computed', 'cached', 'absent'].map(s => key(s, s)));
  for (const [mark, key] of Object.entries(words.signs)) {
    if (equations.join().includes(mark)) items.push(make('span', '', {}, make('b', '', {}, mark), say(key)));
  }
  get('legend').replaceChildren(...items);
}

// ------------------------------------------------------------------------------------------------------------- reach

/** Mark, in all matrices, the rows that the row pointed at depends on and those that depend on it. */
function mark() {
  for (const {element, name, row} of vectors) {
    let relation = '';
    if (pointed) {
      if (name === pointed.name && row === pointed.row) relation = 'here';
      else if (depends(pointed.name, pointed.row, name, row)) relation = 'source';
      else if (depends(name, row, pointed.name, pointed.row)) relation = 'target';
      else if (!['parameter', 'constant'].includes(matrices[name].kind)) relation = 'off';
    }
    for (const r of ['here', 'source', 'target', 'off']) element.classList.toggle(r, r === relation);
  }
  drawStatus();
}

const rowName = (name, row) => (matrices[name].tokens[0] ? quoted(tokens[row]) : say('row', {number: row + 1}));

function listed(rows) {
  if (!rows.length) return say('nothing');
  if (rows.length > 1 && rows.length === count) return say('all_rows');
  const names = rows.map(i => quoted(tokens[i]));
  return names.length <= 6 ? names.join(' ') : say('more', {first: names.slice(0, 3).join(' '), last: names.at(-1), count: names.length});
}

/** The status line: the row pointed at in words, and the number under the pointer. `cell`: {figure, column}. */
function drawStatus(cell = null) {
  for (const element of document.querySelectorAll('.factor')) element.classList.remove('factor');
  get('status').classList.toggle('hint', !pointed);
  if (!pointed) return get('status').replaceChildren(say('hint'));
  const {name, row, gradient} = pointed, every = [...tokens.keys()];
  const parts = [make('b', '', {}, rowName(name, row)), ' ', title(name, gradient)];
  const tell = (key, other, rows) => parts.push(make('span', '', {}, ...sentence(key, {}, {name: `[${other}]`, rows: '[rows]'})
    .map(part => (part.textContent === 'rows' ? make('span', '', {}, listed(rows)) : part))));
  const came = () => every.filter(i => depends(name, row, 'X', i)), reached = () => every.filter(i => depends('Y', i, name, row));
  const [from, to] = gradient ? ['goes_to', 'arrives_from'] : ['came_from', 'reaches'];
  const said = [() => name !== 'X' && matrices[name].kind !== 'parameter' && tell(from, 'X', came()),
    () => name !== 'Y' && tell(to, 'Y', reached())];
  for (const part of gradient ? said.reverse() : said) part();
  if (cell) parts.push(...drawNumber(cell));
  get('status').replaceChildren(...parts);
}

/** The number under the pointer with all digits and, for the result of a product, the sum that gives it. */
function drawNumber({figure, column}) {
  const {name, row, gradient} = pointed, m = matrices[name], array = gradient ? m.gradient : m.values;
  const v = array[row * m.columns + column];
  const parts = [make('span', 'number', {}, ` [${row + 1}, ${column + 1}] = ${exact(v, array)}`)];
  if (m.kind === 'attention' && !gradient && Number.isFinite(v)) {
    const share = {query: quoted(tokens[row]), key: quoted(tokens[column]), percent: percent((100 * v).toPrecision(3))};
    parts.push(make('span', '', {}, say('attends', share)));
  } else if (v === -Infinity) {
    parts.push(make('span', '', {}, say('masked')));
  }
  const line = figure.closest('.equation'), factors = figure.closest('.result') && product(line.dataset.text);
  if (factors) {
    parts.push(make('span', 'sum', {}, sumOf(factors, row, column)));
    markFactors(line, factors, row, column);
  }
  return parts;
}

function point(vector, event) {
  const figure = vector?.closest('figure');
  if (figure && matrices[figure.dataset.name].kind === 'constant') vector = null; // it depends on nothing
  const next = vector && {name: figure.dataset.name, row: Number(vector.dataset.row), gradient: figure.dataset.of === 'gradients'};
  if (next?.name !== pointed?.name || next?.row !== pointed?.row || next?.gradient !== pointed?.gradient) {
    pointed = next;
    mark();
  }
  if (vector && event && !figure.classList.contains('small')) {
    let column = event.target.dataset.column;
    if (event.target.tagName === 'CANVAS') {
      const turned = figure.classList.contains('turned'), {width, height} = event.target.getBoundingClientRect();
      const {columns} = matrices[pointed.name];
      column = Math.min(columns - 1, Math.max(0, Math.floor(turned ? (event.offsetY / height) * columns : (event.offsetX / width) * columns)));
    }
    if (column !== undefined && present(matrices[pointed.name], Number(column))) {
      drawStatus({figure, column: Number(column)});
      if (event.target.tagName === 'CANVAS') event.target.title = get('status').querySelector('.number').textContent.trim();
    }
  }
}

// ---------------------------------------------------------------------------------------------------------- controls

function drawControls() {
  document.documentElement.lang = state.lang === 'zh' ? 'zh-CN' : 'en';
  document.title = say(facts.layer === undefined ? 'title' : 'title_layer', {...facts, layer: facts.layer + 1});
  get('title').textContent = document.title;
  get('facts').textContent = say('facts', {...facts, tokens: count}) + (cropped() ? ' ' + say('cropped') : '');
  get('language').textContent = say('other_language');
  choices('modes', say('show'), [say('values'), say('gradients')], Number(state.gradients), i => {
    if (i) state.decode = 0;
    set({gradients: Boolean(i)});
  });
  choices('heads', say('head'), data.walks.map((_, i) => String(i + 1)), state.head, i => set({head: i}));
  get('heads').hidden = data.walks.length === 1;
  get('decoding').hidden = !data.decode.length;
  get('decoding').firstElementChild.textContent = say('decode');
  get('decode').max = data.decode.length;
  get('back').textContent = '← ' + say('back');
  get('next').textContent = say('next') + ' →';
  get('map').setAttribute('aria-label', say('map'));
}

const cropped = () => Object.values(matrices).some(m => m.rows < m.shape[0] || m.columns < m.shape[1]);

function drawDecode() {
  get('decode').value = state.decode;
  get('decoded').textContent = state.decode ? say('decode_at', {t: state.decode, n: data.decode.length}) : say('decode_off');
  get('modes').querySelectorAll('input')[Number(state.gradients)].checked = true;
}

function set(changes) {
  const held = get('equations').contains(document.activeElement) ? pointed?.row : undefined;
  Object.assign(state, changes);
  document.documentElement.dataset.state = JSON.stringify(state);
  pointed = null;
  const whole = Object.keys(changes).some(key => key !== 'step');
  if ('lang' in changes) drawControls();
  if (whole) {
    vectors = [];
    drawMap();
  }
  drawDecode();
  drawStep();
  if (held !== undefined) { // keep the focus on the row that the keyboard has reached
    get('equations').querySelector(`.result .vector[data-row="${Math.min(held, count - 1)}"]`)?.focus();
  }
}

const move = by => set({step: Math.max(0, Math.min(steps().length - 1, state.step + by))});

get('language').addEventListener('click', () => set({lang: state.lang === 'en' ? 'zh' : 'en'}));
get('back').addEventListener('click', () => move(-1));
get('next').addEventListener('click', () => move(1));
get('decode').addEventListener('input', event => set({decode: Number(event.target.value), gradients: false}));
get('map').addEventListener('click', event => {
  const target = event.target.closest('[data-step]');
  if (!target) return;
  const head = Number(target.dataset.lane ?? state.head), step = Number(target.dataset.step);
  set(head === state.head ? {step} : {step, head});
  get('heads').querySelectorAll('input')[head].checked = true;
});
/** Go to the number before or after in the row that has the focus. */
function moveCell(vector, by) {
  const figure = vector.closest('figure'), m = matrices[figure.dataset.name];
  const last = Number(vector.dataset.column ?? (by > 0 ? -1 : m.columns));
  const column = Math.max(0, Math.min(m.columns - 1, last + by));
  if (!present(m, column)) return;
  vector.dataset.column = column;
  drawStatus({figure, column});
  vector.querySelector(`.cell[data-column="${column}"]`)?.classList.add('factor');
}

const vectorOf = event => event.target.closest?.('.vector');
let place = ''; // of the mouse: if the page changes under a resting mouse, the keyboard keeps its row
document.addEventListener('mousemove', event => {
  const here = `${event.screenX} ${event.screenY}`;
  if (here !== place) point(vectorOf(event), event);
  place = here;
});
document.addEventListener('focusin', event => point(vectorOf(event)));
document.documentElement.addEventListener('mouseleave', () => point(null));
document.addEventListener('focusout', () => point(null));
document.addEventListener('keydown', event => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.tagName === 'INPUT') return;
  const vector = event.target.closest?.('.vector'), by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (by && event.shiftKey && vector) moveCell(vector, by);
  else if (by) move(by);
  if (vector && (event.key === 'ArrowDown' || event.key === 'ArrowUp')) {
    const next = vector[event.key === 'ArrowDown' ? 'nextElementSibling' : 'previousElementSibling'];
    if (next?.classList.contains('vector')) next.focus();
    event.preventDefault();
  }
});
dark.addEventListener('change', () => set({lang: state.lang}));
let width = innerWidth;
addEventListener('resize', () => {
  if (width !== innerWidth) drawStep();
  width = innerWidth;
});

set({lang: state.lang});
