//! Chromium without a screen, driven by the WebDriver protocol. Callers: the tests of the page.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::{Mutex, MutexGuard},
};

use crate::harness::{eventually, skip_without};

/// Maximum time until a page shows an expected text.
pub const SHOWN_WITHIN: Duration = Duration::from_secs(20);

/// An action that must end within a time, with up to three tries, because the machine may be busy.
pub async fn within(what: &str, bound: Duration, mut once: impl AsyncFnMut() -> Duration) {
    let mut took = Vec::new();
    while took.len() < 3 {
        took.push(once().await);
        println!("{what} after {took:?}");
        if took.last().is_some_and(|took| *took <= bound) {
            return;
        }
    }
    panic!("{what} after {took:?}, not within {bound:?}");
}

/// Script that returns visible texts with too little contrast to their background, each with the contrast by WCAG 2.
const UNREADABLE: &str = r"
const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
const bright = (colour) => numbers(colour).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);
const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
        const colour = getComputedStyle(at).backgroundColor;
        if ((numbers(colour)[3] ?? 1) === 1) return colour;
    }
    return 'rgb(255, 255, 255)';
};
const says = (element) => [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim() !== '');
const contrast = (element) => {
    const both = [getComputedStyle(element).color, behind(element)].map(bright).sort((one, other) => other - one);
    return (both[0] + 0.05) / (both[1] + 0.05);
};
const texts = [...document.querySelectorAll('body *')].filter((element) => says(element) && element.checkVisibility());
if (texts.length === 0) return ['nothing is seen'];
return texts.filter((element) => contrast(element) < 4.5).map((element) => `${element.textContent.trim()}: ${contrast(element).toFixed(2)}`);
";

/// Script that returns elements whose content is wider than they are.
const CUT: &str = r"
const isCut = (element) => element.checkVisibility() && element.clientWidth > 0 && element.scrollWidth > element.clientWidth + 1;
return [...document.querySelectorAll('#view *, #panel *')].filter((element) => isCut(element) && !element.closest('input, select, .unseen'))
    .map((element) => `${element.tagName} ${element.className}: ${element.textContent.slice(0, 80)}`);
";

/// Script that returns what axe finds and calls serious or critical, each with its elements.
const FINDINGS: &str = r"
const done = arguments[arguments.length - 1];
const of = ({ id, nodes }) => `${id}: ${nodes.map((node) => node.target).join(' ')}`;
axe.run().then((result) => done(result.violations.map(of)), (error) => done([String(error)]));
";

/// Returns the script of axe, which finds obstacles for people with disabilities; `None` if `.ci/run` could not fetch it.
pub fn axe() -> Option<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/axe/node_modules/axe-core/axe.min.js");
    fs::read_to_string(path).ok()
}

/// One at a time: each takes as much as a whole server.
static TURN: Mutex<()> = Mutex::const_new(());

/// A browser window, closed when dropped.
pub struct Browser {
    driver: Child,
    address: SocketAddr,
    session: String,
    /// Its output is not read.
    _said: BufReader<ChildStdout>,
    _turn: MutexGuard<'static, ()>,
}

impl Browser {
    /// Opens a window. Returns `None` and prints the reason without a browser.
    pub async fn start() -> Option<Self> {
        let turn = TURN.lock().await;
        // The driver may end at once, as when another program takes its port.
        let mut tries = 0;
        let (driver, said, port) = loop {
            tries += 1;
            let mut driver = Command::new("chromedriver");
            driver.arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null());
            let Ok(mut driver) = driver.spawn() else {
                skip_without("chromedriver", "Debian has it in the package chromium-driver");
                return None;
            };
            let mut said = BufReader::new(driver.stdout.take().unwrap());
            let port = said
                .by_ref()
                .lines()
                .map_while(Result::ok)
                .find_map(|line| line.split_once("successfully on port ")?.1.trim_end_matches('.').parse().ok());
            match port {
                Some(port) => break (driver, said, port),
                None => {
                    let _ = driver.kill();
                    assert!(tries < 3, "chromedriver prints its port: {:?}", driver.wait());
                }
            }
        };
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut browser = Self { driver, address, session: String::new(), _said: said, _turn: turn };
        let options = json!({
            "goog:chromeOptions": {"args": ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]},
            "goog:loggingPrefs": {"browser": "ALL"},
        });
        let session = browser.post("/session", json!({"capabilities": {"alwaysMatch": options}})).await;
        browser.session = format!("/session/{}", session["sessionId"].as_str().unwrap());
        browser.resize(1400, 900).await;
        Some(browser)
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: application/json",
            self.address
        );
        let request = format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let mut stream = tokio::net::TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        // The connection stays open for all commands.
        let (mut bytes, mut answer) = (Vec::new(), String::new());
        let body = loop {
            let whole = answer.split_once("\r\n\r\n").and_then(|(head, body)| {
                let length = head
                    .lines()
                    .find_map(|line| line.to_lowercase().strip_prefix("content-length:")?.trim().parse().ok());
                (body.len() >= length.unwrap_or(0)).then_some(body)
            });
            if let Some(body) = whole {
                break body;
            }
            let mut buffer = vec![0; 1 << 20];
            let read = tokio::time::timeout(Duration::from_secs(60), stream.read(&mut buffer)).await;
            let read = read.expect("the driver answers").unwrap();
            assert!(read > 0, "{path}: {answer}");
            bytes.extend_from_slice(&buffer[..read]);
            answer = String::from_utf8_lossy(&bytes).into_owned();
        };
        let mut got: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{path}: {answer}"));
        assert!(got["value"].get("error").is_none_or(Value::is_null), "{path}: {body}");
        got["value"].take()
    }

    async fn of_session(&self, path: &str, body: Value) -> Value {
        self.post(&format!("{}{path}", self.session), body).await
    }

    pub async fn go(&self, url: &str) {
        self.of_session("/url", json!({ "url": url })).await;
    }

    /// The result of a script.
    pub async fn run(&self, script: &str) -> Value {
        self.of_session("/execute/sync", json!({"script": script, "args": []})).await
    }

    /// The text of the first element that matches, and whether it is seen.
    pub async fn text(&self, selector: &str) -> String {
        let script = format!(
            "const found = document.querySelector({}); return found?.checkVisibility() ? found.textContent : '(unseen)'",
            Value::from(selector)
        );
        self.run(&script).await.as_str().unwrap_or_default().to_owned()
    }

    pub async fn shows(&self, selector: &str, text: &str) -> Duration {
        let what = format!("{selector} shows {text:?}");
        eventually(&what, SHOWN_WITHIN, || async { self.text(selector).await.contains(text) }).await
    }

    async fn devtools(&self, command: &str, params: Value) -> Value {
        self.of_session("/goog/cdp/execute", json!({"cmd": command, "params": params})).await
    }

    pub async fn resize(&self, width: u32, height: u32) {
        let params = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.devtools("Emulation.setDeviceMetricsOverride", params).await;
    }

    /// Types a text at the keyboard focus, key by key. U+E000 to U+F8FF are the special keys of WebDriver.
    pub async fn press(&self, keys: &str) {
        let strokes = keys.chars().flat_map(|key| ["keyDown", "keyUp"].map(|kind| json!({"type": kind, "value": key})));
        let keyboard = json!({"type": "key", "id": "keyboard", "actions": strokes.collect::<Vec<_>>()});
        self.of_session("/actions", json!({ "actions": [keyboard] })).await;
    }

    /// The address in the page, behind `#`.
    pub async fn address(&self) -> String {
        self.run("return location.hash").await.as_str().unwrap().to_owned()
    }

    pub async fn back(&self) {
        self.of_session("/back", json!({})).await;
    }

    /// Clicks the first link that matches and has this text, when there is one.
    pub async fn follow(&self, selector: &str, text: &str) {
        let script = format!(
            "const found = [...document.querySelectorAll({})].find((link) => link.textContent === {}); found?.click(); return Boolean(found)",
            Value::from(format!("{selector} a")),
            Value::from(text)
        );
        let what = format!("{selector} has a link {text:?}");
        eventually(&what, SHOWN_WITHIN, async || self.run(&script).await == true).await;
    }

    /// "light" or "dark".
    pub async fn prefer(&self, scheme: &str) {
        let feature = json!({"name": "prefers-color-scheme", "value": scheme});
        self.devtools("Emulation.setEmulatedMedia", json!({"features": [feature]})).await;
    }

    /// How far the page is wider than its window.
    pub async fn overflow(&self) -> i64 {
        let script = "return document.documentElement.scrollWidth - document.documentElement.clientWidth";
        self.run(script).await.as_i64().unwrap()
    }

    /// Returns the findings of axe in the present window.
    async fn findings(&self, axe: &str) -> Value {
        self.run(axe).await;
        self.of_session("/execute/async", json!({"script": FINDINGS, "args": []})).await
    }

    /// Asserts the layout in both colour schemes, and in narrow and wide windows: no horizontal scrolling, enough contrast of every text,
    /// nothing wider than its place, and no finding of axe, if it is there.
    /// Stores pictures under this name.
    pub async fn looks_well(&self, name: &str) {
        let (mut grounds, axe) = (Vec::new(), axe());
        for scheme in ["light", "dark"] {
            self.prefer(scheme).await;
            for width in [400, 1400] {
                self.resize(width, 900).await;
                // A large map is drawn some time after the change of the width. The assertions below name what does not fit.
                let fits = async { while self.overflow().await != 0 || self.run(CUT).await != json!([]) {} };
                let _ = tokio::time::timeout(SHOWN_WITHIN, fits).await;
                self.picture(&format!("{name}-{scheme}-{width}")).await;
                assert_eq!(self.overflow().await, 0, "{name}, {scheme}, {width} pixels");
                for script in [UNREADABLE, CUT] {
                    assert_eq!(self.run(script).await, json!([]), "{name}, {scheme}, {width} pixels");
                }
                if let Some(axe) = &axe {
                    assert_eq!(self.findings(axe).await, json!([]), "{name}, {scheme}, {width} pixels");
                }
            }
            grounds.push(self.run("return getComputedStyle(document.body).backgroundColor").await);
        }
        assert_ne!(grounds[0], grounds[1], "{name}");
    }

    /// Stores a picture of the page for display.
    pub async fn picture(&self, name: &str) {
        self.devtools("Emulation.setScrollbarsHidden", json!({"hidden": true})).await;
        // As wide as the window is without the scrollbar.
        let size = self.run("return [innerWidth, document.documentElement.scrollHeight]").await;
        let clip = json!({"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1});
        let shot = self.devtools("Page.captureScreenshot", json!({"captureBeyondViewport": true, "clip": clip})).await;
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page");
        self.devtools("Emulation.setScrollbarsHidden", json!({"hidden": false})).await;
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(format!("{name}.png")), STANDARD.decode(shot["data"].as_str().unwrap()).unwrap())
            .unwrap();
    }

    /// Lines of the console since the last call.
    pub async fn complaints(&self) -> Vec<String> {
        let said = self.of_session("/se/log", json!({"type": "browser"})).await;
        let said = said.as_array().unwrap().iter().filter(|line| line["level"] != "DEBUG");
        said.map(|line| line["message"].as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The driver closes the window; killed before, it would leave it.
        let close = || {
            let mut stream = TcpStream::connect_timeout(&self.address, Duration::from_secs(2)).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
            let request = format!("DELETE {} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", self.session);
            stream.write_all(request.as_bytes()).ok()?;
            stream.read(&mut [0; 64]).ok()
        };
        close();
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
