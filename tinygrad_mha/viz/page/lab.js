// The lab: sends the settings to the Python process that serves this page, and shows what it has computed.

const settings = data.settings;
const state = {lang: settings.lang};
let chosen = null; // the number that is edited: {name, row, column}
let latest = 0; // of the requests; answers to earlier ones are ignored
let python = '';

const post = (name, body = {}) => fetch(name, {method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(body)});

async function compute() {
  const request = ++latest;
  let result;
  try {
    result = await (await post('compute', settings)).json();
  } catch {
    result = {error: say('ended')};
  }
  if (request !== latest) return;
  get('verdict').className = result.error ? 'error' : result.causal ? 'causal' : 'leak';
  if (result.error) {
    get('verdict').replaceChildren(make('b', '', {}, say('refused')), ' ' + result.error);
    return;
  }
  python = result.python;
  const [leak] = result.leaks;
  const path = leak ? ' ' + say('path', {row: leak.row + 1, sees: leak.sees + 1, path: translate(leak.path), count: result.leaks.length}) : '';
  get('verdict').replaceChildren(make('b', '', {}, say(result.causal ? 'causal' : 'leak')), path,
    make('small', '', {}, ` ${say('computed_in', {milliseconds: result.milliseconds})}`));
  const before = get('frame').contentDocument?.documentElement.dataset.state;
  const begin = JSON.stringify({...JSON.parse(before ?? '{}'), lang: settings.lang});
  get('frame').srcdoc = result.page.replace('<html lang="en">', () => `<html lang="en" data-state='${begin}'>`);
}

/** A path that Python has written, in the language of the page. */
const translate = path => words[state.lang].path_words.reduce((text, [english, own]) => text.replace(new RegExp(english, 'g'), own), path);

/** A click on a number of X or of a weight chooses it. */
function listen() {
  get('frame').contentDocument.addEventListener('click', event => {
    const cell = event.target.closest('.cell'), figure = cell?.closest('figure'), name = figure?.dataset.name;
    if (!cell || figure.dataset.of === 'gradients' || !/^(X|W_[QKVO]\d*)$/.test(name)) return;
    const row = Number(cell.closest('.vector').dataset.row);
    chosen = {name, row, column: Number(cell.dataset.column)};
    get('chosen').textContent = `${name}[${row + 1}, ${chosen.column + 1}]`;
    get('value').disabled = false;
    get('value').value = cell.title.replace('−', '-');
    get('value').focus();
  });
}

function change(name, value) {
  settings[name] = value;
  if (['d_model', 'n_head', 'd_k', 'd_v', 'seed', 'layer', 'sentence'].includes(name)) {
    settings.edits = [];
    settings.cut = settings.cut.filter(head => head <= (data.facts.model ? data.facts.n_head : settings.n_head));
    draw();
  }
  compute();
}

function field(name, type = 'number') {
  const input = make('input', '', {id: name, type, value: settings[name], ...(type === 'number' ? {min: name === 'seed' ? 0 : 1} : {maxlength: 500})});
  input.addEventListener('change', () => change(name, type === 'number' ? Number(input.value) : input.value));
  return make('label', '', {}, say('set_' + name), input);
}

function choice(name) {
  const input = make('select', '', {id: name}, ...data.choices[name].map(value => make('option', '', {value}, say(`${name}_${value}`))));
  input.value = settings[name];
  input.addEventListener('change', () => change(name, input.value));
  return make('label', '', {}, say('set_' + name), input);
}

/** Which layer of the model is changed, counted from 1, and whether the page shows it alone or in the whole model. */
function layerChoice() {
  const input = make('select', '', {id: 'layer'}, ...Array.from({length: data.facts.layers}, (_, i) => make('option', '', {value: i}, i + 1)));
  input.value = settings.layer;
  input.addEventListener('change', () => change('layer', Number(input.value)));
  const whole = make('input', '', {id: 'whole', type: 'checkbox'});
  whole.checked = settings.whole;
  whole.addEventListener('change', () => change('whole', whole.checked));
  return [make('label', '', {}, say('set_layer'), input), make('label', '', {}, whole, say('set_whole'))];
}

function several(name, values) {
  const boxes = values.map(value => {
    const input = make('input', '', {type: 'checkbox', value});
    input.checked = settings[name].includes(value);
    input.addEventListener('change', () => change(name, values.filter(v => (v === value ? input.checked : settings[name].includes(v)))));
    return make('label', '', {}, input, String(value));
  });
  return make('fieldset', '', {id: name}, make('legend', '', {}, say('set_' + name)), ...boxes);
}

function draw() {
  const button = (id, act) => {
    const made = make('button', '', {id, type: 'button'}, say(id));
    made.addEventListener('click', act);
    return made;
  };
  const value = make('input', '', {id: 'value', type: 'text', inputmode: 'decimal', disabled: ''});
  value.addEventListener('change', () => {
    settings.edits.push([chosen.name, chosen.row, chosen.column, value.value.trim() === '' ? null : Number(value.value)]);
    compute().then(() => get('verdict').className === 'error' && settings.edits.pop());
  });
  const shape = data.facts.model ? layerChoice() : [...['n_head', 'd_model', 'd_k', 'd_v', 'seed'].map(name => field(name)), choice('position'), choice('norm')];
  const heads = Array.from({length: data.facts.model ? data.facts.n_head : settings.n_head}, (_, i) => i + 1);
  get('panel').replaceChildren(field('sentence', 'text'), ...shape, choice('mask'), ...(heads.length ? [several('cut', heads)] : []),
    several('identity', ['wq', 'wk', 'wv', 'wo']), make('label', '', {}, make('span', '', {id: 'chosen'}, say('edit')), value),
    button('undo', () => change('edits', [])), button('code_button', showCode),
    button('language', () => {
      state.lang = settings.lang = state.lang === 'en' ? 'zh' : 'en';
      const old = get('frame').contentDocument.documentElement;
      old.dataset.state = JSON.stringify({...JSON.parse(old.dataset.state ?? '{}'), lang: state.lang});
      draw();
      compute();
    }));
}

function showCode() {
  const close = make('button', '', {type: 'button'}, say('close'));
  close.addEventListener('click', () => get('code').close());
  get('code').replaceChildren(make('pre', '', {}, python), close);
  get('code').showModal();
}

get('frame').addEventListener('load', listen);
setInterval(() => post('alive').catch(() => {}), 5000);
addEventListener('pagehide', () => navigator.sendBeacon('bye', '{}'));
draw();
compute();
