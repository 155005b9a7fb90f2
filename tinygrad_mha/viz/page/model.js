// The page of a whole GPT. Probabilities of all settings, draws, costs and predictions were computed by Python.

const state = {lang: data.lang, gradients: false, token: Math.max(0, count - 2), temperature: 3, top_k: 0, top_p: 0, layer: null};
const most = array => array && array.reduce((a, v) => (Number.isFinite(v) ? Math.max(a, Math.abs(v)) : a), 0);
const open = m => {
  const values = unpack(m.values), gradient = unpack(m.gradient);
  return {...m, values, gradient, most: most(values), mostGradient: most(gradient)};
};
const rooms = data.blocks.map((_, layer) => read('room-' + layer)); // the data of the page of each attention
const matrices = Object.fromEntries(Object.entries(data.matrices)
  .map(([name, m]) => [name, open(m.room === undefined ? m : {...rooms[m.room].matrices[m.name], kind: ''})]));
const weightsOf = walk => walk.findIndex(step => /^S(_\d+)?$/.test(step.out));
const weights = rooms.map(room => room.walks.map(walk => open(room.matrices[walk[weightsOf(walk)].out])));
const name = id => data.names[id];
const share = p => (p === null ? 'nan' : percent(p > 0 && p < 0.0005 ? '<0.1' : (100 * p).toFixed(1)));
const number = v => (v === null ? 'nan' : v.toLocaleString('en').replace(/,/g, '\u202f'));
const heightOf = () => Math.max(3, Math.min(9, Math.floor(150 / count)));

/** A matrix as an image, one pixel for each number. */
function paint(m, gradient, width, height) {
  const array = gradient ? m.gradient : m.values, canvas = make('canvas');
  [canvas.width, canvas.height] = [m.columns, m.rows];
  canvas.style.width = width + 'px';
  canvas.style.height = height + 'px';
  const context = canvas.getContext('2d'), image = context.createImageData(m.columns, m.rows);
  array.forEach((v, i) => {
    const rgb = colour(v, gradient ? m.mostGradient : m.most, palette(m, gradient));
    if (rgb) image.data.set([...rgb, 255], 4 * i);
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

/** A result of the run: its title, formula, shape and image. Its button shows the numbers. */
function drawResult(key, formula, heading, most) {
  const m = matrices[key], h = heightOf(), place = make('div', 'place');
  const has = !state.gradients || m.gradient, held = m.columns < m.shape[1] ? say('held', {rows: m.rows, columns: m.columns}) : '';
  place.append(make('b', '', {}, (state.gradients ? '∂L/∂ ' : '') + heading), make('span', 'formula', {}, formula));
  if (has) {
    const button = make('button', '', {type: 'button', 'data-matrix': key, 'aria-label': `${heading}, ${m.shape.join(' × ')}: ${say('larger')}`});
    button.append(paint(m, state.gradients, Math.max(70, Math.min(most, m.columns * 4)), h * count));
    const row = make('i', 'row');
    row.style.top = 4 + h * state.token + 'px';
    row.style.height = h + 'px';
    button.append(row);
    place.append(button);
  }
  const range = has ? '±' + fourDigits(state.gradients ? m.mostGradient : m.most) : say('no_gradient');
  place.append(make('small', '', {}, `${m.shape.join('×')} ${range} ${held}`));
  return place;
}

/** The attention weights of a head in small; its button opens the page of the attention. */
function drawHead(layer, head, size) {
  const text = say('head_of', {layer: layer + 1, head: head + 1}), m = weights[layer][head];
  const button = make('button', '', {type: 'button', 'data-layer': layer, 'data-head': head, title: text, 'aria-label': text});
  if (state.gradients && !m.gradient) button.textContent = '–';
  else button.append(paint(m, state.gradients, size, size));
  return button;
}

function section(id, key, fill, ...children) {
  get(id).replaceChildren(make('h2', '', {}, say('model_' + key)), make('p', '', {}, say('model_' + key + '_why', fill)), ...children);
}

function drawTokens() {
  const pieces = tokens.map((piece, i) => make('button', '', {type: 'button', 'data-token': i, 'aria-pressed': i === state.token},
    visible(piece), make('small', '', {}, data.ids[i])));
  section('tokens', facts.has_text ? 'tokens' : 'ids', {count, vocabulary: number(facts.vocabulary)}, make('div', 'pieces', {}, ...pieces));
}

function drawHeads() {
  const grid = make('div', 'heads'), across = Math.min(900, get('heads').clientWidth - 76);
  const size = Math.max(18, Math.min(64, Math.floor(across / weights[0].length) - 20));
  grid.style.gridTemplateColumns = `auto repeat(${weights[0].length}, auto)`;
  grid.append(make('span'), ...weights[0].map((_, h) => make('span', '', {}, weights[0].length > 16 ? h + 1 : `${say('head')} ${h + 1}`)));
  weights.forEach((heads, l) => grid.append(make('span', '', {}, say('layer', {layer: l + 1})), ...heads.map((_, h) => drawHead(l, h, size))));
  section('heads', 'heads', {}, make('div', 'scroll', {}, grid));
}

function drawGuess(text, p, right) {
  const bar = make('i');
  bar.style.width = 100 * (p ?? 0) + '%';
  return make('div', 'guess', {}, make('span', right ? 'right' : '', {title: text}, (right ? '✓ ' : '') + visible(text)),
    make('span', 'bar', {}, bar), make('span', '', {}, share(p)));
}

/** What a state would predict for the token that follows the chosen one. */
function drawLens(key) {
  const lens = data.lenses[key], t = state.token, answer = data.ids[t + 1], cell = make('div', 'lens');
  cell.append(...lens.ids[t].map((id, i) => drawGuess(name(id), lens.p[t][i], id === answer)));
  if (answer === undefined) cell.append(make('small', '', {}, say('no_answer')));
  else cell.append(make('small', '', {}, say('answer', {token: quoted(tokens[t + 1]), rank: lens.answer_rank[t], p: share(lens.answer_p[t])})));
  return cell;
}

function drawStream() {
  const rows = make('div', '', {id: 'rows'}), sign = text => make('span', 'sign', {}, text);
  const row = (key, formula, heading, branch) => rows.append(make('div', 'state', {}, drawResult(key, formula, heading, 240)),
    make('div', 'branch', {}, ...branch), drawLens(key));
  const first = [drawResult('token', 'wte[id]', say('part_token'), 174)];
  if (matrices.position) first.push(sign('+'), drawResult('position', 'wpe', say('part_position'), 174));
  rows.append(make('div', 'block', {}, say('embedding')));
  row('embedding', matrices.position ? 'x = token + position' : 'x = token', say('part_embedding'), first);
  data.blocks.forEach((steps, l) => {
    rows.append(make('div', 'block', {}, say('layer', {layer: l + 1})));
    let branch = [];
    for (const step of steps) {
      const heading = say('part_' + (step.key.startsWith('norm') ? 'norm_' + facts.norm : step.key.split('_')[0]), facts);
      if (step.stream) {
        row(step.name, 'x = ' + step.formula, say('part_state'), branch);
        branch = [];
        continue;
      }
      if (branch.length) branch.push(sign('→'));
      const place = drawResult(step.name, step.formula, heading, 174);
      if (step.key === 'attention') place.append(make('div', 'thumbs', {}, ...weights[l].map((_, h) => drawHead(l, h, 34))));
      branch.push(place);
    }
  });
  if (matrices.final) {
    rows.append(make('div', 'block', {}, say('part_final')), make('div', 'branch', {}, drawResult('final', 'norm(x)', say('part_norm_' + facts.norm), 240)));
  }
  const loss = facts.loss_value === null ? say('no_loss') : say('loss_is', {loss: fourDigits(facts.loss_value)});
  section('stream', 'stream', {width: facts.width, next: quoted(tokens[state.token])}, make('p', '', {}, loss), rows);
}

function drawNext() {
  const s = data.sampling, at = (t, k, p) => s.settings[(t * s.top_k.length + k) * s.top_p.length + p];
  const last = quoted(tokens[count - 1]);
  if (!s.settings.length) return section('next', 'next', {last}, make('p', '', {}, say('not_finite')));
  const stages = [at(state.temperature, 0, 0), at(state.temperature, state.top_k, 0), at(state.temperature, state.top_k, state.top_p)];
  const settings = make('div', 'settings', {}, ...['temperature', 'top_k', 'top_p'].map(id => make('fieldset', '', {id})));
  const body = make('tbody'), cellOf = p => {
    const bar = make('i');
    bar.style.width = 100 * p + '%';
    return make('td', '', {}, make('span', 'bar', {}, bar), share(p));
  };
  s.ids.forEach((id, i) => body.append(make('tr', stages[2].p[i] ? '' : 'out', {}, make('th', '', {scope: 'row'}, visible(name(id))),
    make('td', '', {}, s.logits[i] === null ? '−∞' : fourDigits(s.logits[i])), ...stages.map(stage => cellOf(stage.p[i])))));
  if (facts.vocabulary > s.ids.length) {
    body.append(make('tr', '', {}, make('th', '', {scope: 'row'}, say('rest', {count: number(facts.vocabulary - s.ids.length)})), make('td'),
      ...stages.map(stage => cellOf(Math.max(0, stage.rest)))));
  }
  const heads = ['token', 'logit', 'after_temperature', 'after_top_k', 'after_top_p'].map(key => make('th', '', {scope: 'col'}, say(key)));
  const draws = stages[2].draws.map((id, seed) => make('span', '', {}, make('small', '', {}, `${say('seed')} ${seed}: `), quoted(name(id)), ' '));
  section('next', 'next', {last}, settings, make('div', 'scroll', {}, make('table', '', {}, make('thead', '', {}, make('tr', '', {}, ...heads)), body)),
    make('p', '', {id: 'draws'}, say('kept', {kept: number(stages[2].kept)}), ' ', ...draws));
  const choose = (id, shown) => choices(id, say(id), s[id === 'temperature' ? 'temperatures' : id].map(shown), state[id], i => set({[id]: i}));
  choose('temperature', String);
  for (const id of ['top_k', 'top_p']) choose(id, v => (v === null ? say('off') : String(v)));
}

function drawCache() {
  if (!data.decode.length) return section('cache', 'cache', {}, make('p', '', {}, say('no_cache')));
  const keys = ['computed', 'kept', 'thrown', 'read', 'products', 'products_without'], body = make('tbody');
  const line = (head, step) => make('tr', '', {}, make('th', '', {scope: 'row'}, head), ...keys.map(key => make('td', '', {}, number(step[key]))),
    make('td', '', {}, percent(Math.round(100 - (100 * step.products) / step.products_without))));
  data.decode.forEach((step, i) => body.append(line(`${i + 1} ${visible(tokens[i])}`, step)));
  const sum = Object.fromEntries(keys.map(key => [key, data.decode.reduce((a, step) => a + step[key], 0)]));
  body.append(line(say('total'), sum));
  const heads = ['step_token', ...keys, 'saved_part'].map(key => make('th', '', {scope: 'col'}, say('cache_' + key)));
  const wrong = data.decode.findIndex(step => !step.agrees);
  section('cache', 'cache', {logits: number(data.decode[0].logits)}, make('div', 'scroll', {}, make('table', '', {}, make('thead', '', {}, make('tr', '', {}, ...heads)), body)),
    make('p', '', {}, wrong < 0 ? say('cache_agrees') : say('cache_differs', {step: wrong + 1})));
}

/** The numbers of a matrix, in a dialog. */
function enlarge(key) {
  const m = matrices[key], array = state.gradients ? m.gradient : m.values, body = make('tbody');
  for (let i = 0; i < m.rows; i++) {
    const cells = Array.from(array.subarray(i * m.columns, (i + 1) * m.columns), v => {
      const rgb = colour(v, state.gradients ? m.mostGradient : m.most, palette(m, state.gradients));
      const cell = make('td', '', {title: exact(v, array)}, shortNumber(v));
      cell.style.backgroundColor = css(rgb);
      cell.style.color = ink(rgb);
      return cell;
    });
    body.append(make('tr', '', {}, make('th', '', {scope: 'row'}, visible(tokens[i])), ...cells));
  }
  const close = make('button', '', {type: 'button'}, say('close'));
  close.addEventListener('click', () => get('large').close());
  get('large').replaceChildren(close, make('p', '', {}, `${state.gradients ? '∂L/∂ ' : ''}${key}, ${m.shape.join(' × ')} `,
    m.columns < m.shape[1] ? say('held', {rows: m.rows, columns: m.columns}) : ''), make('table', '', {}, body));
  get('large').showModal();
}

/** Show the page of the attention of a layer, in its own document. */
function enter(layer, head = 0) {
  state.layer = layer;
  const begin = JSON.stringify({lang: state.lang, head, step: weightsOf(rooms[layer].walks[head]), gradients: state.gradients});
  get('frame').srcdoc = read('template').replace('{{DATA}}', () => get('room-' + layer).textContent)
    .replace('<html lang="en">', () => `<html lang="en" data-state='${begin}'>`);
  get('room').hidden = false;
  document.documentElement.classList.add('entered');
  get('model').inert = true;
  get('leave').textContent = '← ' + say('leave');
  choices('layers', say('layers'), data.blocks.map((_, i) => String(i + 1)), layer, i => enter(i));
  get('leave').focus();
}

function leave() {
  get('room').hidden = true;
  document.documentElement.classList.remove('entered');
  get('model').inert = false;
  get('frame').srcdoc = '';
  get('heads').querySelector(`[data-layer="${state.layer}"]`)?.focus();
}

function set(changes) {
  const held = document.activeElement, fieldset = held?.closest('fieldset')?.id, token = held?.dataset.token;
  Object.assign(state, changes);
  document.documentElement.lang = state.lang === 'zh' ? 'zh-CN' : 'en';
  document.title = get('title').textContent = say('model_title');
  get('facts').textContent = say('model_facts', {...facts, parameters: number(facts.parameters), tokens: count}) + (cropped() ? ' ' + say('model_cropped') : '');
  get('language').textContent = say('other_language');
  choices('modes', say('show'), [say('values'), say('gradients')], Number(state.gradients), i => set({gradients: Boolean(i)}));
  for (const draw of [drawTokens, drawHeads, drawStream, drawNext, drawCache]) draw();
  get('status').textContent = say('model_hint');
  if (fieldset) get(fieldset)?.querySelector('input:checked')?.focus();
  if (token !== undefined) get('tokens').querySelector(`[data-token="${token}"]`)?.focus();
}

const cropped = () => Object.values(matrices).some(m => m.columns < m.shape[1]);

document.addEventListener('click', event => {
  const target = event.target.closest('button');
  if (!target) return;
  const {token, matrix, layer, head} = target.dataset;
  if (token !== undefined) set({token: Number(token)});
  if (matrix !== undefined) enlarge(matrix);
  if (layer !== undefined) enter(Number(layer), Number(head));
});
document.addEventListener('mousemove', event => {
  const button = event.target.closest?.('[data-matrix]'), canvas = button?.querySelector('canvas');
  if (!canvas) return;
  const m = matrices[button.dataset.matrix], box = canvas.getBoundingClientRect(), array = state.gradients ? m.gradient : m.values;
  const find = (offset, size, n) => Math.max(0, Math.min(n - 1, Math.floor((offset / size) * n)));
  const i = find(event.clientY - box.top, box.height, m.rows), j = find(event.clientX - box.left, box.width, m.columns);
  get('status').textContent = `${quoted(tokens[i])} ${button.dataset.matrix} [${i + 1}, ${j + 1}] = ${exact(array[i * m.columns + j], array)}`;
});
get('language').addEventListener('click', () => set({lang: state.lang === 'en' ? 'zh' : 'en'}));
get('leave').addEventListener('click', leave);
document.addEventListener('keydown', event => event.key === 'Escape' && !get('room').hidden && leave());
dark.addEventListener('change', () => set({}));

set({});
